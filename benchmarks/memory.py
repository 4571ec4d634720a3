"""Resident memory against the number of clients, on the same data.

    python benchmarks/memory.py

Each case runs in a process of its own: two rounds with all clients over 12,000 images of 3 x 32 x 32, the FedPAC CNN,
one epoch. The peak of the resident set is what the operating system counted; the growth over 20 clients is what the
package must answer for.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
from datetime import date
from functools import partial

CASES = [("FedAvg", 20), ("FedAvg", 1000), ("FedPAC", 20), ("FedPAC", 1000), ("FedPer", 1000), ("LocalOnly", 1000)]


def measure(method: str, clients: int) -> None:
    """Run two rounds and print the peak resident set and the bytes of personal state, in MB."""
    import lightning as L
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from pfl_lightning import Federation, methods
    from pfl_lightning.callbacks import FederatedLoop
    from pfl_lightning.datamodules import IID, FromDatasets

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (12000, 3, 32, 32), dtype=np.uint8))
    dataset = TensorDataset(images, torch.from_numpy(rng.integers(0, 10, 12000)))
    data = FromDatasets(train=dataset, test=dataset, partition=IID(clients), batch_size=12, validation_share=0.0)
    federation = Federation(partial(getattr(methods, method), epochs=1), "fedpac_cnn", seed=0)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[FederatedLoop()],
    )
    trainer.fit(federation, datamodule=data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"RESULT {peak:.1f} {federation.personal.num_bytes / 2**20:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return measure(args.only[0], int(args.only[1]))
    print(f"{date.today()}, {platform.machine()}\n")
    print("| method | clients | peak resident set, MB | growth over 20 clients, MB | personal state, MB |")
    print("|---|---|---|---|---|")
    base: dict[str, float] = {}
    for method, clients in CASES:
        command = [sys.executable, __file__, "--only", method, str(clients)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT"))
        peak, personal = (float(value) for value in line.split()[1:])
        base.setdefault(method if clients == 20 else "", peak)
        reference = base.get(method, base["FedAvg"])
        print(f"| {method} | {clients} | {peak:.0f} | {peak - reference:+.0f} | {personal:.1f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
