"""Share of a FedPAC round on CIFAR-10 that the checks of updates and of the server take.

    python benchmarks/checks.py --root data/cifar10
    python benchmarks/checks.py --encoder resnet18 --clients 2 --epochs 1

The workload is that of FedPAC's Table 1: 600 images a client, the paper's CNN, 5 epochs, batches of 50. Without
``--root`` (a folder with train/<class>/*), the images are random ones of the same shape; the time does not depend on
them.

The checks are timed where they run, inside the rounds of one run, so that the ratio does not depend on how two runs
differ: checks of updates and the comparison of
their norms, snapshots of the server before each update and the comparison of the server with itself after
the aggregation, and the guard against divergence. The first round is left out.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from pfl_lightning import Federation
from pfl_lightning import methods as m
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FederatedDataModule, FromDatasets, ImageFolder
from pfl_lightning.federation.divergence import DivergenceGuard
from pfl_lightning.server import Aggregator
from pfl_lightning.state.image import Snapshot
from pfl_lightning.state.update_norms import UpdateGuard

SETTINGS = {"lr": 0.02, "momentum": 0.5, "weight_decay": 5e-4}
SAMPLES, BATCH = 600, 50
TIMED = (
    (Aggregator, "check"),
    (UpdateGuard, "norms"),
    (UpdateGuard, "fault"),
    (Snapshot, "__init__"),
    (Snapshot, "growth"),
    (DivergenceGuard, "exceeded"),
    (DivergenceGuard, "falls"),
)
MOST = 0.01


class Clock:
    """Sums the time that functions take; on a GPU, up to the end of what they have started there.

    Args:
        device: Where the clients train.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def wait(self) -> float:
        """The time, once the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = self.wait()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += self.wait() - start

        return run


class Rounds(L.Callback):
    """Seconds of each round, and of its checks, without the evaluation.

    Args:
        clock: Times the checks.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.shares: list[float] = []
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.clock.seconds, self._start = 0.0, self.clock.wait()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.seconds.append(self.clock.wait() - self._start)
        self.shares.append(self.clock.seconds / self.seconds[-1])


def make_data(root: str | None, clients: int) -> FederatedDataModule:
    """CIFAR-10 from a folder, or random images of its shape."""
    if root is not None:
        partition = IID(clients, samples_per_client=SAMPLES)
        return ImageFolder(root=root, partition=partition, batch_size=BATCH, validation_share=0.0)
    generator = torch.Generator().manual_seed(0)
    count = clients * SAMPLES
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    dataset = TensorDataset(images, torch.randint(0, 10, (count,), generator=generator))
    return FromDatasets(train=dataset, test=dataset, partition=IID(clients), batch_size=BATCH, validation_share=0.0)


def main() -> None:
    """Print the share of each round and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder of CIFAR-10 with train/<class>/* and test/<class>/*")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--encoder", default="fedpac_cnn", help="a registered name")
    parser.add_argument("--method", default="FedPAC")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = Clock(torch.device("cuda" if args.accelerator in ("gpu", "cuda") else "cpu"))
    for owner, name in TIMED:
        setattr(owner, name, clock.timed(getattr(owner, name)))
    rounds = Rounds(clock)
    trainer = L.Trainer(
        max_epochs=args.rounds,
        accelerator=args.accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[FederatedLoop(), rounds],
    )
    method = partial(getattr(m, args.method), epochs=args.epochs, **SETTINGS)
    trainer.fit(Federation(method, args.encoder, seed=0), datamodule=make_data(args.root, args.clients))
    share = statistics.median(rounds.shares[1:])
    print(
        f"{date.today()}, {platform.machine()}, {args.threads} threads, {args.method}, {args.clients} clients, "
        f"{args.encoder}, {'random images' if args.root is None else 'CIFAR-10'}, torch {torch.__version__}"
    )
    seconds = zip(rounds.seconds[1:], rounds.shares[1:], strict=True)
    print("; ".join(f"{took:.2f} s, checks {100 * part:.3f} %" for took, part in seconds))
    print(f"checks / round = {share:.5f} (median; at most {MOST}: {'yes' if share <= MOST else 'no'})")


if __name__ == "__main__":
    main()
