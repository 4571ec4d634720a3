"""Cost of a round by the number of clients and by the cohort: time, start-up, memory, checkpoint.

    python benchmarks/many_clients.py
    python benchmarks/many_clients.py --engine vectorized --methods LocalOnly --clients 100 1000 --picture none

Random vectors of 32 numbers, 20 a client for training, at most 200,000 for tests, of which each client has 20, an
encoder of 12,480 parameters (mlp), one epoch in batches of 10: a local fit is so short that whatever grows with the
number of clients shows. Against the number of clients the cohort is fixed, against the cohort the number of clients.
After each round a fixed sample of 50 clients is evaluated. FedAvg has nothing personal, FedPer a head, LocalOnly
everything.

Each point runs in a process of its own, since memory is a process's. Seconds a round (training and aggregation) and
seconds of its evaluation are medians over the rounds after the first. Start-up is from the call of fit, when the data
are there as tensors, to the first round: most of it divides the data. With ``--datasets`` they are TensorDatasets.
Memory is the growth of the resident set beside the data, from before the call to the end; all of the index lists are
in it. The checkpoint is that of the last round: with a personal part it has a row for every client that took part until
then.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ENGINES = {"sequential": "SequentialEngine", "vectorized": "VectorizedEngine", "ray": "RayEngine"}
METHODS = ("FedAvg", "FedPer", "LocalOnly")
SAMPLES, WIDTH, CLASSES, EVALUATED, TESTS = 20, 32, 10, 50, 200_000


@dataclass(frozen=True)
class Point:
    """Measured setting.

    Attributes:
        method: Name of the method.
        clients: Number of clients.
        cohort: Clients in a round.
    """

    method: str
    clients: int
    cohort: int


@dataclass(frozen=True)
class Cost:
    """Measured costs.

    Attributes:
        round: Seconds of a round's training and aggregation.
        evaluation: Seconds of the evaluation after it.
        start: Seconds until the first round.
        work: Seconds of a processor in this time, which other jobs on the machine change less.
        memory: Growth of the resident set beside the data, in MB.
        data: What the samples themselves are, in MB.
        checkpoint: Size of the last checkpoint, in MB.
    """

    round: float
    evaluation: float
    start: float
    work: float
    memory: float
    data: float
    checkpoint: float


def make_engine(name: str) -> Any:
    """An engine by its name on the command line."""
    import pfl_lightning

    return getattr(pfl_lightning, ENGINES[name])()


# ---------------------------------------------------------------------- one point


def measure(point: Point, args: argparse.Namespace) -> Cost:
    """Run the rounds of one point in this process."""
    import lightning as L
    import torch
    from torch.utils.data import TensorDataset

    from pfl_lightning import Federation, methods
    from pfl_lightning.callbacks import FederatedLoop
    from pfl_lightning.datamodules import IID, FederatedDataModule, FromDatasets, Samples
    from pfl_lightning.state.checkpoints import AtomicCheckpointIO

    class RandomVectors(FederatedDataModule):
        """Vectors without meaning."""

        def load(self) -> Samples:
            return Samples(*train, tuple(str(label) for label in range(CLASSES)), *test)

    def vectors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        some = torch.randn(min(number, TESTS), WIDTH, generator=torch.Generator().manual_seed(number))
        inputs = torch.empty(number, WIDTH)
        for piece in inputs.split(len(some)):
            piece.copy_(some[: len(piece)])
        return inputs, torch.arange(number) % CLASSES

    class Clock(L.Callback):
        """Timer of rounds and evaluations."""

        def __init__(self) -> None:
            self.times: dict[str, list[float]] = {"work": [], "round": [], "trained": [], "evaluated": []}

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.times["work"].append(time.process_time())
            self.times["round"].append(time.perf_counter())

        def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.times["trained"].append(time.perf_counter())

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.times["evaluated"].append(time.perf_counter())

        def median(self, start: str, end: str) -> float:
            pairs = zip(self.times[start], self.times[end], strict=True)
            return statistics.median([b - a for a, b in pairs][1:])

    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    engine = make_engine(args.engine)
    train, test = (vectors(number) for number in (point.clients * SAMPLES, min(point.clients * SAMPLES, TESTS)))
    before = resident()
    options: dict[str, Any] = {"batch_size": 10, "validation_share": args.validation_share}
    data: FederatedDataModule = RandomVectors(IID(point.clients), **options)
    if args.datasets:
        datasets = {"train": TensorDataset(*train), "test": TensorDataset(*test)}
        data = FromDatasets(IID(point.clients), **datasets, **options)
    method = partial(getattr(methods, point.method), lr=0.01, epochs=1)
    federation = Federation(method, "mlp", engine, seed=0, client_state_memory_gb=args.client_state_memory_gb)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=args.rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO()],
        callbacks=[FederatedLoop(point.cohort, eval_cohort=min(EVALUATED, point.clients)), clock],
    )
    start, work = time.perf_counter(), time.process_time()
    trainer.fit(federation, datamodule=data)
    memory = resident() - before
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder) / "last.ckpt")
        checkpoint = (Path(folder) / "last.ckpt").stat().st_size
    return Cost(
        round=clock.median("round", "trained"),
        evaluation=clock.median("trained", "evaluated"),
        start=clock.times["round"][0] - start,
        work=clock.times["work"][0] - work,
        memory=memory / 1e6,
        data=sum(part.nbytes for part in (*train, *test)) / 1e6,
        checkpoint=checkpoint / 1e6,
    )


def resident() -> int:
    """The resident set in bytes; where the operating system does not tell it, its peak."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_its_own_process(point: Point) -> Cost:
    """Measure a point in a new process, with the arguments of this one."""
    command = [sys.executable, "-W", "ignore", *sys.argv, "--only", json.dumps(asdict(point))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return Cost(**json.loads(line.removeprefix("RESULT ")))


# ---------------------------------------------------------------------- the table and the picture


def draw(costs: dict[Point, Cost], series: Sequence[tuple[str, str, list[Point]]], args: argparse.Namespace) -> None:
    """One row against the number of clients, one against the cohort."""
    from matplotlib.figure import Figure

    panels = {"round": "s a round", "start": "s until the first round", "memory": "memory, MB", "checkpoint": "MB"}
    titles = ("round", "start-up", "memory beside the data", "checkpoint")
    figure = Figure(figsize=(13, 6), layout="constrained")
    grid = figure.subplots(len(series), len(panels), squeeze=False)
    for axes, (axis, fixed, points) in zip(grid, series, strict=True):
        for panel, (name, label), title in zip(axes, panels.items(), titles, strict=True):
            for method in args.methods:
                own = [point for point in points if point.method == method]
                x = [getattr(point, axis) for point in own]
                panel.plot(x, [getattr(costs[point], name) for point in own], marker="o", label=method)
            panel.set(xscale="log", xlabel=f"{axis} ({fixed})", ylabel=label, title=title, ylim=(0, None))
            panel.grid(alpha=0.3)
    grid[0][0].legend()
    Path(args.picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=110)
    print(f"\nSaved {args.picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="sequential", choices=ENGINES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    numbers = [100, 1000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--clients", type=int, nargs="+", default=numbers, help="at the fixed cohort")
    parser.add_argument("--fixed-cohort", type=int, default=50)
    parser.add_argument("--cohorts", type=int, nargs="*", default=[10, 50, 200], help="at the fixed number of clients")
    parser.add_argument("--fixed-clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--validation-share", type=float, default=0.0)
    parser.add_argument("--datasets", action="store_true", help="the data are TensorDatasets, read by FromDatasets")
    parser.add_argument("--client-state-memory-gb", type=float, default=4.0, help="0 keeps all client states on disk")
    parser.add_argument(
        "--picture", default="docs/images/cost_curves.png", help="path of the figure; none for no figure"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return print("RESULT", json.dumps(asdict(measure(Point(**json.loads(args.only)), args))))
    by_clients = [Point(method, number, args.fixed_cohort) for method in args.methods for number in args.clients]
    by_cohort = [Point(method, args.fixed_clients, number) for method in args.methods for number in args.cohorts]
    series = [
        ("clients", f"cohort {args.fixed_cohort}", by_clients),
        ("cohort", f"{args.fixed_clients:,} clients", by_cohort),
    ]
    series = [(axis, fixed, points) for axis, fixed, points in series if points]
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, engine {args.engine}, {args.rounds} rounds\n")
    print(
        "| method | clients | cohort | start-up, s (of a processor) | data, MB "
        "| memory beside them, MB | of it for 1,000 clients, MB "
        "| s a round | s of evaluation | checkpoint, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    costs: dict[Point, Cost] = {}
    for _, _, points in series:
        for point in points:
            if point in costs:
                continue
            cost = costs[point] = in_its_own_process(point)
            print(
                f"| {point.method} | {point.clients:,} | {point.cohort} | {cost.start:.2f} ({cost.work:.2f}) "
                f"| {cost.data:,.0f} | {cost.memory:,.0f} | {1000 * cost.memory / point.clients:.2f} "
                f"| {cost.round:.3f} | {cost.evaluation:.3f} | {cost.checkpoint:.2f} |",
                flush=True,
            )
    if args.picture != "none":
        draw(costs, series, args)
    return None


if __name__ == "__main__":
    main()
