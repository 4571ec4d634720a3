"""What each method costs beside FedAvg and beside a plain loop: time, operations, bytes, memory; and what it can serve.

    python benchmarks/method_costs.py
    python benchmarks/method_costs.py --methods FedAvg FedPAC --repetitions 5
    python benchmarks/method_costs.py --write          # also the file that `pfl methods` reads
    python benchmarks/method_costs.py --compare        # with that file: exit code 1 where a method became slower

The workload is FedPAC's without augmentation: random images of 3 x 32 x 32, a tenth of them for validation, the
paper's CNN, batches of 50, SGD; three clients of 200 images, two epochs. What is done once for each client weighs much
there: it stands beside 8 steps. The column *long* is the overhead with the paper's 600 images and 5 epochs, 55 steps.

Time is processor time, and every round stands beside a plain loop that runs right after it, so that a machine that is
shared and drifts does not decide; the median of such pairs is printed.

- *work*: floating-point operations of a round's forward and backward passes (torch's counter) over those of FedAvg.
- *time*: time of a round over that of FedAvg, each as a multiple of the plain loop.
- *overhead*: time of a round over that of its passes in the plain loop: so much of the loop's forward time as the
  method has operations in forward passes, those without gradients included, and so much of the rest of the loop's time
  (backward passes and steps of SGD) as it has operations in backward passes.
- bytes of a client's messages in a round, and of what it and the server keep.
- *unequal encoders*: whether two encoders of one feature width train together.
- *novel clients*: mean test accuracy on the digits (dealt iid) of clients that never train, without a personalization;
  after ten rounds at the rate 0.05, the same for every method.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import lightning as L
import torch
from plain_loop import (
    LONG,
    QUIET,
    SETTINGS,
    SHORT,
    Passes,
    PlainLoop,
    Workload,
    fit,
    images,
    made,
    public_of,
    start,
)
from torch import Tensor, nn

from pfl_lightning import Federation
from pfl_lightning.cli.methods import COSTS, MethodCosts, read_costs
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import Message
from pfl_lightning.methods import METHODS, FedAvg

NOVEL_RATE = 0.05
"""Rate of the clients of every method before novel ones are evaluated, in place of its default. Those of Per-FedAvg
(0.001) and pFedMe (0.005) are for many rounds: after ten, nothing could be said of what their global models serve."""

GOAL = 1.10
"""Largest overhead."""

MARGIN = 0.10
"""How far an overhead may be above the kept one: medians of one version on a shared machine differ by half of it."""


class Watcher(L.Callback):
    """Operations of the second round, the last messages of a client, and times of later rounds beside a plain loop.

    Attributes:
        passes: The operations.
        times: Rounds as multiples of the plain loop.
        overheads: Rounds as multiples of their passes in the plain loop.
    """

    def __init__(self, plain: PlainLoop | None) -> None:
        self.plain, self.passes = plain, Passes()
        self.times: list[float] = []
        self.overheads: list[float] = []
        self.sent: Message | None = None
        self.received: Message | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the messages that come and go."""
        server = pl_module.server
        broadcast, receive = server.broadcast, server.receive

        def sending(client: int, round: int) -> Message:
            self.sent = broadcast(client, round)
            return self.sent

        def receiving(update: Message) -> None:
            self.received = update
            receive(update)

        server.broadcast, server.receive = sending, receiving

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the server its own functions back."""
        del pl_module.server.broadcast, pl_module.server.receive

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock or the counter."""
        if trainer.current_epoch == 1:
            self.passes.__enter__()
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop them."""
        seconds = time.process_time() - self._start
        if trainer.current_epoch == 1:
            self.passes.__exit__(None, None, None)
        elif trainer.current_epoch > 1 and self.plain is not None:
            loop, passes = self.plain.seconds(self.passes)
            self.times.append(seconds / loop)
            self.overheads.append(seconds / passes)


def watched(
    method: type[FederatedClient], workload: Workload, plain: PlainLoop | None, repetitions: int
) -> tuple[Federation, Watcher]:
    """A federation after two rounds and those that are timed."""
    watcher = Watcher(plain)
    make = made(method, epochs=workload.epochs, **SETTINGS)
    return fit(make, "fedpac_cnn", images(method, workload), 2 + repetitions, watcher), watcher


@dataclass(frozen=True)
class Baseline:
    """FedAvg's passes and its time, and the plain loops; ``None`` where no time is measured."""

    operations: int
    time: float
    short: PlainLoop | None
    long: PlainLoop | None


def baseline_of(repetitions: int) -> Baseline:
    """What methods are compared with."""
    short, long = (PlainLoop(SHORT), PlainLoop(LONG)) if repetitions else (None, None)
    watcher = watched(FedAvg, SHORT, short, 2 * repetitions)[1]
    time = statistics.median(watcher.times) if repetitions else 1.0
    return Baseline(watcher.passes.get_total_flops(), time, short, long)


def parts_of(message: Message | None) -> list[str]:
    """What a message carries: modules of the model, and fields beside them."""
    parts: dict[str, None] = {}
    for name, _, _ in message.tensors() if message is not None else ():
        field, _, inner = name.partition(".")
        parts[inner.split(".")[0] if field == "weights" and "." in inner else field] = None
    return list(parts)


def tensors_of(content: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_of(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from tensors_of(value)


def size(tensors: Iterator[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def linear(width: int | None) -> Callable[[Sequence[int]], nn.Module]:
    """Makes an encoder to 16 features, with a hidden layer or without."""

    def make(shape: Sequence[int]) -> nn.Module:
        inputs = int(torch.Size(shape).numel())
        layers = (
            [nn.Linear(inputs, 16)] if width is None else [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 16)]
        )
        network = nn.Sequential(nn.Flatten(), *layers, nn.ReLU())
        network.out_features = 16  # type: ignore[assignment]
        return network

    return make


def takes_unequal_encoders(method: type[FederatedClient]) -> bool:
    """Whether two architectures of one feature width train together."""
    with_partner = {"partner": linear(32)} if "partner" in inspect.signature(method).parameters else {}
    data = Digits(IID(4, 40), batch_size=10, validation_share=0.2, **public_of(method))
    try:
        fit(made(method, epochs=1, **with_partner), [linear(None), linear(32)], data, 1)
    except ConfigurationError as error:
        if "in all architectures of what clients share" in str(error):
            return False
        raise
    return True


def novel_accuracy(method: type[FederatedClient]) -> float:
    """Mean test accuracy of two clients that never train."""
    data = Digits(IID(10, 100), batch_size=10, novel_clients=2, validation_share=0.1, **public_of(method))
    federation = fit(made(method, epochs=5, lr=NOVEL_RATE), linear(32), data, 10)
    L.Trainer(**QUIET).test(federation, datamodule=data, verbose=False)
    return statistics.fmean(federation.test_scores[client].accuracy for client in data.novel)


def costs_of(method: type[FederatedClient], baseline: Baseline, repetitions: int) -> MethodCosts:
    """The costs of a method."""
    federation, watcher = watched(method, SHORT, baseline.short, repetitions)
    long = watched(method, LONG, baseline.long, repetitions)[1] if repetitions else watcher
    stores, client = federation.server.client_states(), federation.data.participating[0]
    return MethodCosts(
        method=method.__name__,
        down=parts_of(watcher.sent),
        up=parts_of(watcher.received),
        down_bytes=watcher.sent.num_bytes if watcher.sent else 0,
        up_bytes=watcher.received.num_bytes if watcher.received else 0,
        client_bytes=size(tensors_of(federation.clients.stored(client))),
        server_bytes=size(iter([*federation.server.parameters(), *federation.server.buffers()])),
        server_bytes_per_client=size(tensors_of([store.get(client) for store in stores])),
        work=round(watcher.passes.get_total_flops() / baseline.operations, 2),
        time=round(statistics.median(watcher.times) / baseline.time, 2) if repetitions else None,
        overhead=round(statistics.median(watcher.overheads), 2) if repetitions else None,
        overhead_long=round(statistics.median(long.overheads), 2) if repetitions else None,
        unequal_encoders=takes_unequal_encoders(method),
        novel_accuracy=round(novel_accuracy(method), 3),
    )


def regressions(row: MethodCosts, kept: MethodCosts) -> list[str]:
    """Sentences on the overheads of a method that are above the kept ones by more than the margin."""
    names = {"overhead": "few steps", "overhead_long": "many steps"}
    pairs = {steps: (getattr(row, name), getattr(kept, name)) for name, steps in names.items()}
    return [
        f"{row.method}, {steps}: {now:.2f} times its passes in a plain loop, {before:.2f} in the kept figures"
        for steps, (now, before) in pairs.items()
        if now is not None and before is not None and now > before + MARGIN
    ]


def compared(
    method: type[FederatedClient], baseline: Baseline, repetitions: int, measure: Callable[..., MethodCosts] = costs_of
) -> list[str]:
    """The regressions of a method that a second measurement shows, too."""
    kept, found = read_costs()[method.__name__], list[str]()
    for _ in range(2):
        found = regressions(measure(method, baseline, repetitions), kept)
        if not found:
            break
    return found


def main() -> None:
    """Print the table, and write the file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[method.__name__ for method in METHODS])
    parser.add_argument(
        "--repetitions",
        type=int,
        default=3,
        help="timed rounds of either workload; 0 measures no time, only what does not depend on it",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the file that `pfl methods` reads")
    parser.add_argument("--compare", action="store_true", help="print which methods became slower than the file says")
    args = parser.parse_args()
    machine = start(args.threads)
    if args.compare:
        baseline = baseline_of(args.repetitions)
        chosen = [method for method in METHODS if method.__name__ in args.methods]
        slower = [line for method in chosen for line in compared(method, baseline, args.repetitions)]
        print("\n".join(slower) or f"none of {len(chosen)} methods became slower than {COSTS.name} says")
        raise SystemExit(int(bool(slower)))
    columns = "work | time | overhead | long | down, kB | up, kB | client keeps, kB | unequal encoders | novel, %"
    print(f"| method | {columns} |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    baseline = baseline_of(args.repetitions)
    for method in METHODS:
        if method.__name__ in args.methods:
            row = costs_of(method, baseline, args.repetitions)
            sizes = (row.down_bytes, row.up_bytes, row.client_bytes)
            print(
                f"| {row.method} | {row.work} | {row.time or '-'} | {row.overhead or '-'} | "
                f"{row.overhead_long or '-'} | "
                + " | ".join(f"{one / 1e3:.1f}" for one in sizes)
                + f" | {'yes' if row.unequal_encoders else 'no'} | {100 * row.novel_accuracy:.0f} |",
                flush=True,
            )
            if args.write:
                write(row, machine)
    print(f"\ngoal: an overhead of at most {GOAL}")


def write(row: MethodCosts, machine: str) -> None:
    """Put a row into the file; times that were measured before stay if none was measured now."""
    known = read_costs()
    before = known.get(row.method)
    if row.time is None and before is not None and before.time is not None:
        times = {name: getattr(before, name) for name in ("time", "overhead", "overhead_long", "measured")}
        row = replace(row, **times)
    known[row.method] = row if row.measured else replace(row, measured=f"{date.today()}, {machine}")
    ordered = [asdict(known[method.__name__]) for method in METHODS if method.__name__ in known]
    COSTS.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
