"""A method's round beside a plain PyTorch loop of the same method: is the package slower than what one would write?

    python benchmarks/own_loops.py
    python benchmarks/own_loops.py --methods GPFL Calibre --repetitions 9

``method_costs.py`` holds rounds against FedAvg's loop, which has none of what a method computes beside its network.
Here each method has a loop of its own (``benchmarks/loops``), written from the paper's equations. The workloads and
settings are those of ``method_costs.py``, and the methods' arguments are their defaults, but for DualFed's lambda.

First both prove that they do the same work: two rounds of few steps (FedEMA: three), each from the same state with the
same batches and draws, must end in the same parameters, and in the same of whatever else server and clients keep,
within ``torch.allclose(rtol=1e-3, atol=1e-5)``. This is in double precision, since rounding of single precision decides
which cluster a sample is in (Calibre) and is multiplied where features are nearly equal (DCPFL, DualFed). The largest
difference of a number is printed.

Then both are timed in single precision. The loop runs right after the package's round, from the state that it began
with, and the ratio of their processor times is taken for each such pair, without the first. Reading, loading and
comparing states is not timed. What the loops leave out is in the ratio: checks of messages and of losses, the copies by
which a failed round is undone, the losses that are logged, covariances that are small on the wire (DCPFL), and
lightly's loss in place of one that takes a single product of matrices (PFLSSL, Calibre).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from loops import Loop, Setting, State
from loops.calibre import Calibre
from loops.dcpfl import DCPFL
from loops.dualfed import DualFed
from loops.fedema import FedEMA
from loops.gpfl import GPFL
from loops.per_fedavg import PerFedAvg
from loops.pfedhn import MOMENTUM, PFedHN
from loops.pfl_ssl import PFLSSL
from plain_loop import BATCH, LONG, QUIET, SETTINGS, SHORT, Workload, images, made, start

from pfl_lightning import Federation
from pfl_lightning import methods as package
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.client import FederatedClient
from pfl_lightning.encoders import build_encoder

LOOPS: dict[str, type[Loop]] = {
    loop.__name__: loop for loop in (PerFedAvg, GPFL, PFedHN, DCPFL, DualFed, PFLSSL, FedEMA, Calibre)
}
ENCODER, SEED = "fedpac_cnn", 0
OPTIONS: dict[str, Any] = {"DualFed": {"contrastive": 1.0}}
"""What is no default: with a lambda of 40 DualFed diverges on random images, whose features become equal."""
PROOF: dict[str, int] = {"FedEMA": 3}
"""Rounds that are compared, where these are not two: FedEMA's divergence decides on its mixture from the third on."""
PLACES = {
    "objective.target.copies.0": "target.encoder",
    "objective.target.copies.1.layers": "target.projector",
    "tor.layers.": "tor.",
    "objective.": "",
}
"""Where the package keeps the networks of self-supervised objectives, and their names in the loops."""
RTOL, ATOL = 1e-3, 1e-5
WASTEFUL = 1.05
"""Ratio above which a round is worth a profile."""


def state_of(federation: Federation) -> tuple[State, list[State]]:
    """Copies of what the package's server and clients keep, under the names of the loops."""
    server = federation.server
    if hasattr(server, "learner"):
        network, optimizer = server.learner.network, server.learner.optimizer
        found = dict(network.state_dict())
        for name, parameter in network.named_parameters():
            momentum = optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
            found |= {} if momentum is None else {MOMENTUM + name: momentum}
    else:
        found = server.weights.as_state() if hasattr(server, "weights") else server.state_dict()
    kept = [federation.personal.get(client) for client in range(federation.num_clients)]
    return _copied(found), [_copied(state) for state in kept]


def _copied(state: State) -> State:
    return {plain_name(name): tensor.detach().clone() for name, tensor in state.items()}


def plain_name(name: str) -> str:
    """The loops' name of what the package keeps under this one."""
    if name.startswith("own."):
        name = name.replace("/", ".")
    for place, plain in PLACES.items():
        name = name.replace(place, plain)
    return name


class Beside(L.Callback):
    """Times rounds of the package, and after each the same round of a loop; compares where both end.

    Attributes:
        ratios: Processor time of the package's rounds over the loop's, after the first round.
        largest: Largest difference of a number.
        unequal: What differs by more than rounding, by name.
    """

    def __init__(self, make_loop: Callable[[Setting], Loop], epochs: int) -> None:
        self.make_loop, self.epochs = make_loop, epochs
        self.seconds: list[tuple[float, float]] = []
        self.largest, self.unequal = 0.0, set[str]()
        self.clock = Clock(self)
        self.loop: Loop | None = None

    @property
    def ratios(self) -> list[float]:
        """Ratios of the times, without the first round's."""
        return [own / loop for own, loop in self.seconds[1:]]

    def setting(self, federation: Federation) -> Setting:
        """What the loop trains on."""
        data = federation.data
        parts = [data.client_data(client).train.loader(BATCH).tensors() for client in range(federation.num_clients)]
        make_encoder = partial(build_encoder, ENCODER, data.input_shape)
        double = federation.trainer.precision == "64-true"
        parts = [(inputs.double() if double else inputs, labels) for inputs, labels in parts]
        return Setting(parts, data.num_classes, make_encoder, self.epochs, BATCH, SETTINGS, SEED)

    def start(self, federation: Federation) -> None:
        """Give the loop the round's first state, and start the clock."""
        self.loop = self.loop or self.make_loop(self.setting(federation))
        self.loop.load(*state_of(federation))
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock, run the loop, compare."""
        seconds = time.process_time() - self._start
        assert self.loop is not None
        with torch.enable_grad():
            start = time.process_time()
            self.loop.round(trainer.current_epoch)
            self.seconds.append((seconds, time.process_time() - start))
        server, clients = state_of(pl_module)
        own_server, own_clients = self.loop.state()
        for who, got, expected in zip(
            ("server", *(f"client {client}" for client in range(len(clients)))),
            (own_server, *own_clients),
            (server, *clients),
            strict=True,
        ):
            self.compare(who, got, expected)

    def compare(self, who: str, got: State, expected: State) -> None:
        """Take a difference of two states into account."""
        self.unequal |= {f"{who}: {name}" for name in got.keys() ^ expected.keys()}
        for name in got.keys() & expected.keys():
            one, other = got[name].detach().double(), expected[name].double()
            self.largest = max(self.largest, float((one - other).abs().max()))
            if not torch.allclose(one, other, rtol=RTOL, atol=ATOL):
                self.unequal.add(f"{who}: {name}")


class Clock(L.Callback):
    """Starts the clock before anything of a round has begun: it comes first of the callbacks."""

    def __init__(self, beside: Beside) -> None:
        self.beside = beside

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start it."""
        self.beside.start(pl_module)


def compared(name: str, workload: Workload, rounds: int, precision: Any = "32-true") -> Beside:
    """Rounds of a method and of its loop."""
    method: type[FederatedClient] = getattr(package, name)
    options = OPTIONS.get(name, {})
    beside = Beside(partial(LOOPS[name], **options), workload.epochs)
    federation = Federation(made(method, epochs=workload.epochs, **options, **SETTINGS), ENCODER, seed=SEED)
    callbacks: list[Any] = [beside.clock, FederatedLoop(), beside]
    trainer = L.Trainer(max_epochs=rounds, limit_val_batches=0, callbacks=callbacks, precision=precision, **QUIET)
    trainer.fit(federation, datamodule=images(method, workload))
    return beside


def shown(ratios: list[float]) -> str:
    """Median and quartiles."""
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--repetitions", type=int, default=5, help="timed rounds of either workload")
    parser.add_argument("--clients", type=int, default=LONG.clients, help="clients of the workload of many steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    start(args.threads)
    print("| method | few steps | many steps | largest difference |")
    print("|---|---|---|---|", flush=True)
    failed = []
    for name in args.methods:
        proof = compared(name, SHORT, PROOF.get(name, 2), "64-true")
        both = [compared(name, one, 1 + args.repetitions) for one in (SHORT, replace(LONG, clients=args.clients))]
        times = " | ".join(shown(beside.ratios) for beside in both)
        print(f"| {name} | {times} | {proof.largest:.1e} |", flush=True)
        failed += [f"{name}, {what}" for what in sorted(proof.unequal)]
    print(f"\nmedian (quartiles) of the package's time over the loop's; worth a profile above {WASTEFUL}")
    if failed:
        sys.exit("these are not alike:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
