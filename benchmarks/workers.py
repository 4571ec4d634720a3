"""Time of a round under RayEngine as a ratio to a plain PyTorch loop, and what a local fit costs beyond the fit itself.

    python benchmarks/workers.py
    python benchmarks/workers.py --overhead

The first table: the workload of round_time.py under RayEngine with two workers of one thread each, beside the plain
loop on two threads, in alternation; evaluation is left out on both sides, and the round in which the workers start is
not counted. The second (--overhead): one worker of one thread, one short local epoch, so that what is not the fit is
seen: the time of a round per client less the time that the worker says its fits took; and the bytes that travel, a fit.
SequentialEngine in this process on one thread stands beside it.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Iterator
from datetime import date
from typing import Any

import numpy as np
import torch
from round_time import BATCH, SAMPLES, package_rounds, plain_round
from torch.utils.data import TensorDataset

from pfl_lightning import RayEngine, SequentialEngine
from pfl_lightning import methods as m
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.engines import FitEnvironment, FitResult


def make_data(clients: int) -> tuple[FromDatasets, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (clients * SAMPLES, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, clients * SAMPLES))
    dataset = TensorDataset(images, labels)
    data = FromDatasets(train=dataset, test=dataset, partition=IID(clients), batch_size=BATCH, validation_share=0.0)
    return data, (images.float() / 255 - 0.5) / 0.25, labels


def ratios(args: argparse.Namespace) -> None:
    data, floats, labels = make_data(args.clients)
    plain_round(floats, labels, 1, args)  # warm up
    plain: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in args.methods}
    for _ in range(args.repetitions):
        for name, values in found.items():
            torch.set_num_threads(args.threads)
            plain.append(plain_round(floats, labels, args.clients, args))
            engine = RayEngine(workers=args.workers)
            values.append(package_rounds(getattr(m, name), data, engine, 2, args) / plain[-1])
    print(f"plain loop on {args.threads} threads: median {statistics.median(plain):.2f} s a round\n")
    print(f"| {args.workers} one-thread workers | median ratio to the plain FedAvg loop | smallest | largest |")
    print("|---|---|---|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |")


class Watched(RayEngine):
    """Remembers how long the fits took, as the workers saw it."""

    def run(self, tasks: Any, environment: FitEnvironment) -> Iterator[FitResult]:
        """As RayEngine."""
        self.fits: list[float] = []  # of the last round
        for result in super().run(tasks, environment):
            self.fits.append(result.seconds)
            yield result


def overhead(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    args.epochs = 1
    data, _, _ = make_data(args.clients)
    print(
        "| method | SequentialEngine, ms a fit | RayEngine | of it the fit in the worker | beyond the fit | "
        "KB sent | received |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in args.methods:
        rows: list[tuple[float, float, float]] = []
        for _ in range(args.repetitions):
            engine, rounds = Watched(workers=1), 3
            one = package_rounds(getattr(m, name), data, SequentialEngine(), rounds, args)
            ray = package_rounds(getattr(m, name), data, engine, rounds, args)
            rows.append((one, ray, sum(engine.fits)))
        per_fit = 1000 / args.clients
        sequential, whole, fits = (per_fit * statistics.median(column) for column in zip(*rows, strict=True))
        beyond = per_fit * statistics.median(ray - inside for _, ray, inside in rows)
        sent, received = (n / 1000 / rounds / args.clients for n in (engine.bytes_sent, engine.bytes_received))
        print(f"| {name} | {sequential:.1f} | {whole:.1f} | {fits:.1f} | {beyond:.1f} | {sent:.0f} | {received:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--encoder", default="fedpac_cnn", help="a registered name")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=["FedAvg", "FedPAC"], choices=["FedAvg", "FedPAC"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the plain loop")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--overhead", action="store_true", help="the second table")
    args = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {args.clients} clients, {args.encoder}, torch {torch.__version__}")
    (overhead if args.overhead else ratios)(args)


if __name__ == "__main__":
    main()
