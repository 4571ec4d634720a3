r"""Time of a round under VectorizedEngine and its options, and as a ratio to SequentialEngine.

    python benchmarks/engines.py
    python benchmarks/engines.py --accelerator gpu --clients 20 100 --precision 32-true bf16-mixed \
        --encoder fedpac_cnn dcpfl resnet18 --cuda-graphs

The workload is that of FedPAC's Table 1 without augmentation: 600 images of 3 x 32 x 32 a client, the paper's CNN, 5
epochs, batches of 50 (random images, so that no data set is needed). ``--encoder dcpfl`` is DC-PFL with its five
networks, assigned in turn. Each repetition runs all engines in turn, and the median of the ratios within a repetition
is printed, so that a machine that is shared and drifts does not decide. Warm-up rounds
are not counted; evaluation is left out everywhere. What an engine said (a fallback, a group that was halved) is printed
below the table.

The table ends within ``--minutes``, give or take a run: rows share the time, a row is repeated while its share lasts,
and what there is no time for is left out.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache, partial

import lightning as L
import numpy as np
import torch
from torch.utils.data import TensorDataset

from pfl_lightning import Engine, Federation, SequentialEngine, VectorizedEngine
from pfl_lightning import methods as m
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets

SETTINGS = {"lr": 0.02, "momentum": 0.5, "weight_decay": 5e-4}
DCPFL = [f"dcpfl_cnn{number}" for number in range(1, 6)]


class RoundTimer(L.Callback):
    """Seconds of each epoch of the outer Trainer, start to end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = _now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.seconds.append(_now() - self._start)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Loop(FederatedLoop):
    """All clients in the last round, and some in the rounds before."""

    def __init__(self, warming_up: int) -> None:
        super().__init__()
        self.warming_up = warming_up

    def sample_cohort(self, round: int, num_clients: int, seed: int, max_rounds: int | None) -> list[int]:
        """The first clients, until the last round."""
        last = max_rounds is not None and round == max_rounds - 1
        return list(range(num_clients if last else min(self.warming_up, num_clients)))


class Sayings(logging.Handler):
    """Keeps what the engines log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line once."""
        self.lines[record.getMessage()] = None


@dataclass
class Case:
    """An engine in a row of the table.

    Attributes:
        make: Makes the engine for a number of clients.
        warms_up_all: Whether all clients take part in the warm-up: graphs are made for a number of clients.
        seconds: Of a round, by repetition.
        memory: The most that tensors took on the device, in MiB.
        failed: Why there are no numbers.
    """

    make: Callable[[int], Engine]
    warms_up_all: bool = True
    seconds: list[float] = field(default_factory=list)
    memory: float = 0.0
    failed: str = ""


def make_cases(args: argparse.Namespace) -> dict[str, Case]:
    """The columns of the table."""
    cases = {"SequentialEngine": Case(lambda clients: SequentialEngine(), warms_up_all=False)}
    for forward in args.forward:
        name = "VectorizedEngine" if forward == "auto" else f"VectorizedEngine, {forward}"
        cases[name] = Case(partial(VectorizedEngine, forward=forward))
    if args.cuda_graphs:
        cases["CUDA graphs"] = Case(partial(VectorizedEngine, forward=args.forward[0], cuda_graphs=True))
    return cases


@lru_cache(maxsize=1)
def make_data(clients: int, samples: int, batch: int) -> FromDatasets:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (clients * samples, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, clients * samples))
    dataset = TensorDataset(images, labels)
    return FromDatasets(train=dataset, test=dataset, partition=IID(clients), batch_size=batch, validation_share=0.0)


def round_seconds(case: Case, clients: int, precision: str, encoder: str, args: argparse.Namespace) -> float:
    """Seconds of a round after the warm-up: the first one has no centroids to align to."""
    timer = RoundTimer()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator=args.accelerator,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[Loop(clients if case.warms_up_all else 10), timer],
    )
    name = args.method or ("DCPFL" if encoder == "dcpfl" else "FedPAC")
    method = partial(getattr(m, name), epochs=args.epochs, **SETTINGS)
    federation = Federation(method, DCPFL if encoder == "dcpfl" else encoder, case.make(clients), seed=0)
    trainer.fit(federation, datamodule=make_data(clients, args.samples, args.batch))
    return timer.seconds[-1]


def run_case(case: Case, clients: int, precision: str, encoder: str, args: argparse.Namespace) -> None:
    """One repetition of a case."""
    on_gpu = args.accelerator == "gpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        case.seconds.append(round_seconds(case, clients, precision, encoder, args))
    except Exception as error:  # the other columns are worth having
        case.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if on_gpu:
        case.memory = torch.cuda.max_memory_allocated() / 2**20


def describe(case: Case, reference: Case) -> str:
    """Seconds, times as fast as the reference, and the range of that."""
    if case.failed or not case.seconds:
        return "failed" if case.failed else "-"
    seconds = f"{statistics.median(case.seconds):.2f}"
    if case is reference or not reference.seconds:
        return seconds
    ratios = sorted(a / b for a, b in zip(reference.seconds, case.seconds, strict=False))
    spread = f", {ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else ""
    return f"{seconds} ({statistics.median(ratios):.2f}x{spread})"


def run_row(encoder: str, clients: int, precision: str, until: float, args: argparse.Namespace) -> list[str]:
    """Measure and print a row; gives notes to be printed below the table."""
    cases, sayings = make_cases(args), Sayings()
    log = logging.getLogger("pfl_lightning")
    log.addHandler(sayings)
    for repetition in range(args.repetitions):
        if repetition and time.monotonic() > until:
            break
        for case in cases.values():
            if not case.failed and (not repetition or case.seconds):
                run_case(case, clients, precision, encoder, args)
    log.removeHandler(sayings)
    reference = cases["SequentialEngine"]
    cells = [encoder, str(clients), precision, *(describe(case, reference) for case in cases.values())]
    memory = [f"{case.memory:.0f}" if case.memory else "-" for case in cases.values()]
    print(f"| {' | '.join([*cells, ' / '.join(memory)])} |", flush=True)
    failed = [f"{name} failed: {case.failed}" for name, case in cases.items() if case.failed]
    return [f"{encoder}, {clients} clients, {precision}: {line}" for line in (*failed, *sayings.lines)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--precision", nargs="+", default=["32-true"])
    parser.add_argument("--clients", type=int, nargs="+", default=[20])
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--encoder", nargs="+", default=["fedpac_cnn"], help="registered names, or dcpfl for its five")
    parser.add_argument("--method", choices=[method.__name__ for method in m.METHODS], help="default: by the encoder")
    parser.add_argument("--forward", nargs="+", default=["auto"], choices=["auto", "vmap"])
    parser.add_argument("--cuda-graphs", action="store_true", help="also captured")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("pfl_lightning").propagate = False
    hardware = f"{platform.machine()}, {args.threads} threads"
    if args.accelerator == "gpu":
        hardware = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, lightning {L.__version__}"
    settings = f"{args.samples} samples, batches of {args.batch}, {args.epochs} epochs"
    print(f"{date.today()}, {hardware}, {versions}, {args.method or 'FedPAC (dcpfl: DCPFL)'}, {settings}\n")
    names = list(make_cases(args))
    columns = ["encoder", "clients", "precision", *(f"{name}, s" for name in names), "MiB"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    rows = list(itertools.product(args.clients, args.encoder, args.precision))
    start, notes = time.monotonic(), list[str]()
    for number, (clients, encoder, precision) in enumerate(rows, 1):
        if time.monotonic() - start > 60 * args.minutes:
            notes += [f"{e}, {c} clients, {p}: no time was left" for c, e, p in rows[number - 1 :]]
            break
        share = 60 * args.minutes * number / len(rows)
        notes += run_row(encoder, clients, precision, start + share, args)
    print("\n" + "\n".join(f"- {note}" for note in notes))


if __name__ == "__main__":
    main()
