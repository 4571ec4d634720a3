"""Time of a round as a ratio to a plain PyTorch loop that does the same optimizer steps.

    python benchmarks/round_time.py
    python benchmarks/round_time.py --encoder resnet18 --clients 2 --epochs 1 --methods FedAvg

The workload is that of FedPAC's Table 1 without augmentation: 600 images of 3 x 32 x 32 a client, the paper's CNN, 5
epochs, batches of 50. The images are random (the time does not depend on them), so that no data set is needed. Each
repetition runs the plain loop, FedAvg and FedPAC in turn; the ratios are taken within a repetition, and their median is
printed, so that a machine that is shared and drifts does not decide. Evaluation is left out on all sides.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from functools import partial

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pfl_lightning import Engine, Federation, SequentialEngine, TrainerEngine
from pfl_lightning import methods as m
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.encoders import build_encoder

SETTINGS = {"lr": 0.02, "momentum": 0.5, "weight_decay": 5e-4}
SAMPLES, BATCH = 600, 50


class RoundTimer(L.Callback):
    """Seconds of each epoch of the outer Trainer, start to end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._start)


def plain_round(inputs: torch.Tensor, labels: torch.Tensor, clients: int, args: argparse.Namespace) -> float:
    """FedAvg by hand over float tensors: the loop to compare with."""
    encoder = build_encoder(args.encoder, (3, 32, 32))
    model = nn.Sequential(encoder, nn.Linear(encoder.out_features, 10))
    start = time.perf_counter()
    received = {name: value.clone() for name, value in model.state_dict().items()}
    total = {name: torch.zeros_like(value) for name, value in received.items()}
    for client in range(clients):
        model.load_state_dict(received)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, weight_decay=5e-4)
        x, y = (t[client * SAMPLES : (client + 1) * SAMPLES] for t in (inputs, labels))
        for _ in range(args.epochs):
            order = torch.randperm(SAMPLES)
            for begin in range(0, SAMPLES, BATCH):
                index = order[begin : begin + BATCH]
                loss = F.cross_entropy(model(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for name, value in model.state_dict().items():
            total[name] = total[name] + value * (SAMPLES / (clients * SAMPLES))
    return time.perf_counter() - start


def package_rounds(
    method: type[m.FedAvg], data: FromDatasets, engine: Engine, rounds: int, args: argparse.Namespace
) -> float:
    """Seconds of the last of ``rounds`` rounds through the outer Trainer."""
    timer = RoundTimer()
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[FederatedLoop(), timer],
    )
    federation = Federation(partial(method, epochs=args.epochs, **SETTINGS), args.encoder, engine, seed=0)
    trainer.fit(federation, datamodule=data)
    return timer.seconds[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--encoder", default="fedpac_cnn", help="a registered name")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=["FedAvg", "FedPAC"], choices=["FedAvg", "FedPAC"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trainer-fit", action="store_true", help="also time TrainerEngine (slow)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (args.clients * SAMPLES, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, args.clients * SAMPLES))
    floats = (images.float() / 255 - 0.5) / 0.25
    dataset = TensorDataset(images, labels)
    data = FromDatasets(
        train=dataset, test=dataset, partition=IID(args.clients), batch_size=BATCH, validation_share=0.0
    )
    cases = {
        # FedPAC has centroids to align to from its second round on.
        "FedAvg, SequentialEngine": lambda: package_rounds(m.FedAvg, data, SequentialEngine(), 1, args),
        "FedPAC, SequentialEngine": lambda: package_rounds(m.FedPAC, data, SequentialEngine(), 2, args),
    }
    cases = {name: case for name, case in cases.items() if name.split(",")[0] in args.methods}
    if args.trainer_fit:
        cases["FedAvg, TrainerEngine"] = lambda: package_rounds(m.FedAvg, data, TrainerEngine(), 1, args)
    plain_round(floats, labels, 1, args)  # warm up
    plain: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.repetitions):
        plain.append(plain_round(floats, labels, args.clients, args))
        for name, case in cases.items():
            ratios[name].append(case() / plain[-1])
    print(
        f"{date.today()}, {platform.machine()}, {args.threads} threads, {args.clients} clients, "
        f"{args.encoder}, torch {torch.__version__}"
    )
    print(f"plain loop: median {statistics.median(plain):.2f} s a round\n")
    print("| round | median ratio to the plain FedAvg loop | smallest | largest |\n|---|---|---|---|")
    for name, values in ratios.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |")


if __name__ == "__main__":
    main()
