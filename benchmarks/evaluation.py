"""Time of an evaluation under VectorizedEngine as a ratio to SequentialEngine.

    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --accelerator gpu --clients 20 100 --methods FedBABU

Clients have validation parts of three sizes (random images, so that no data set is needed). They train for a round, so
that their models differ; then both engines evaluate them in turn, and the median of the ratios within a repetition is
printed. Methods that fine-tune before an evaluation, as FedBABU does, are fine-tuned together under VectorizedEngine.
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
from torch.utils.data import TensorDataset

from pfl_lightning import Engine, Federation, SequentialEngine, VectorizedEngine
from pfl_lightning import methods as m
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets, Quantity


class EvaluationTimer(L.Callback):
    """Seconds of the last validation."""

    seconds = 0.0

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = _now()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.seconds = _now() - self._start


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_data(clients: int, samples: int) -> FromDatasets:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (2 * clients * samples, 3, 32, 32), dtype=np.uint8))
    dataset = TensorDataset(images, torch.from_numpy(rng.integers(0, 10, len(images))))
    partition = Quantity(IID(clients), (samples // 2, samples, 2 * samples))
    return FromDatasets(train=dataset, test=dataset, partition=partition, batch_size=50, validation_share=0.5)


def make_trainer(args: argparse.Namespace, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        max_epochs=1,
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


def seconds_under(engine: Engine, federation: Federation, data: FromDatasets, args: argparse.Namespace) -> float:
    federation.engine, timer = engine, EvaluationTimer()
    make_trainer(args, timer).validate(federation, datamodule=data, verbose=False)
    return timer.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--clients", type=int, nargs="+", default=[20])
    parser.add_argument("--samples", type=int, default=200, help="of the client of middle size, half of them evaluated")
    parser.add_argument("--encoder", default="mlp", help="a registered name")
    names = [method.__name__ for method in m.METHODS]
    parser.add_argument("--methods", nargs="+", default=["FedBABU"], choices=names)
    parser.add_argument("--forward", default="auto", choices=["auto", "vmap"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hardware = (
        torch.cuda.get_device_name() if args.accelerator == "gpu" else f"{platform.machine()}, {args.threads} threads"
    )
    print(f"{date.today()}, {hardware}, {args.encoder}, {args.precision}, {args.forward}, torch {torch.__version__}")
    print("| method | clients | SequentialEngine, s | VectorizedEngine, s | times as fast (range) |")
    print("|---|---|---|---|---|")
    for clients in args.clients:
        data = make_data(clients, args.samples)
        for name in args.methods:
            federation = Federation(
                partial(getattr(m, name), epochs=1, lr=0.01), args.encoder, SequentialEngine(), seed=0
            )
            make_trainer(args, FederatedLoop()).fit(federation, datamodule=data)
            engines = SequentialEngine(), VectorizedEngine(clients, forward=args.forward)
            for engine in engines:  # the first evaluation warms up
                seconds_under(engine, federation, data, args)
            times = [[seconds_under(e, federation, data, args) for e in engines] for _ in range(args.repetitions)]
            sequential, vectorized = (statistics.median(column) for column in zip(*times, strict=True))
            ratios = sorted(a / b for a, b in times)
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| {name} | {clients} | {sequential:.3f} | {vectorized:.3f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
