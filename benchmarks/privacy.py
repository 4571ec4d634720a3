"""What privacy costs of a round, and what it leaves of accuracy.

    python benchmarks/privacy.py            # the cost, held to 2 % of a round
    python benchmarks/privacy.py --utility  # accuracy by epsilon on the digits

The cost is the processor time of bounds, sums, noise and accounts, less that of the server's own receiving, which they
take the place of, as a ratio of a round with to a round without. Medians over rounds after the first, whose accounts
take a tenth of a second once.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from pfl_lightning import Federation, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, ClassesPerClient, Digits, FromDatasets
from pfl_lightning.methods import DCPFL, FedAvg, FedPAC, FedPer, FedProto
from pfl_lightning.privacy import ClientPrivacy

LIMIT = 0.02
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}


class Shares(L.Callback):
    """Processor seconds of rounds, and of privacy in them."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """A round begins; from the first on, the mechanism is watched."""
        self._private, mechanism = 0.0, pl_module.mechanism
        for name in ("add", "release", "metrics"):
            if name not in vars(mechanism):
                setattr(mechanism, name, self._timed(getattr(mechanism, name)))
        self._began = time.process_time()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            found = function(*arguments)
            self._private += time.process_time() - began
            return found

        return timed

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The round is over; there is no evaluation."""
        self.rounds.append((time.process_time() - self._began, self._private))


def images() -> FromDatasets:
    """Ten clients of 600 images."""
    generator = torch.Generator().manual_seed(0)
    train, test = (
        TensorDataset(torch.randn(n, 3, 32, 32, generator=generator), torch.randint(10, (n,), generator=generator))
        for n in (6000, 100)
    )
    return FromDatasets(train=train, test=test, partition=IID(10), batch_size=50)


def cost(name: str, method: Any, encoder: str, data: Any, rounds: int) -> bool:
    """Print the ratio of a round with privacy to one without; return whether it is small enough."""
    federation, shares = Federation(method, encoder, seed=0, privacy=ClientPrivacy(1.0)), Shares()
    loop = FederatedLoop()
    trainer = L.Trainer(max_epochs=rounds + 1, limit_val_batches=0, callbacks=[loop, shares], **QUIET)
    trainer.fit(federation, datamodule=data)
    ratio = statistics.median(whole / (whole - private) for whole, private in shares.rounds[1:])
    seconds = statistics.median(whole for whole, _ in shares.rounds[1:])
    print(f"{name}: a round of {seconds:.2f} s, ratio {ratio:.4f}", flush=True)
    return ratio <= 1 + LIMIT


def costs(data: list[str], rounds: int) -> None:
    """Print the cost for weights and for class statistics, of ten clients with 5 local epochs."""
    good = []
    if "images" in data:
        good.append(cost("FedAvg, FedPAC's CNN, images", partial(FedAvg, epochs=5), "fedpac_cnn", images(), rounds))
    for method in (FedAvg, FedProto, DCPFL) if "digits" in data else ():
        digits = Digits(batch_size=10, seed=0, partition=IID(10))
        good.append(cost(f"{method.__name__}, digits", partial(method, epochs=5), "small_cnn", digits, rounds))
    print(f"at most {1 + LIMIT}: {'yes' if all(good) else 'NO'}")


METHODS: dict[str, Any] = {
    "FedAvg": partial(FedAvg, lr=0.02),
    "FedPer": partial(FedPer, lr=0.02),
    "FedPAC": partial(FedPAC, lr=0.02, combination=False),
    "FedProto": partial(FedProto, lr=0.02),
    "FedProto-classifier": partial(FedProto, lr=0.02, prediction="classifier"),
}


def utility(names: list[str], rounds: int, multipliers: list[float]) -> None:
    """Print mean test accuracies by epsilon: 100 clients of two classes each, half of them in a round."""
    os.environ.setdefault("PFL_PRIVACY_SEED", "0")  # these data are no secret
    print("| method | without | " + " | ".join(f"z = {z:g}" for z in multipliers) + " |")
    for name in names:
        row = []
        for privacy in (None, *(ClientPrivacy(z, clip_norm=0.5, class_norm=1.0) for z in multipliers)):
            federation = Federation(METHODS[name], "mlp", engine=VectorizedEngine(), seed=0, privacy=privacy)
            loop = FederatedLoop(0.5)
            trainer = L.Trainer(max_epochs=rounds, limit_val_batches=0, callbacks=[loop], **QUIET)
            data = Digits(batch_size=10, seed=0, partition=ClassesPerClient(100, 2))
            trainer.fit(federation, datamodule=data)
            found = trainer.test(federation, datamodule=data, verbose=False)[0]["test_accuracy/mean"]
            spent = "" if federation.mechanism is None else f" (epsilon {federation.mechanism.epsilon():.2f})"
            row.append(f"{100 * found:.1f}{spent}")
        print(f"| {name} | {' | '.join(row)} |", flush=True)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utility", action="store_true")
    parser.add_argument("--data", nargs="+", choices=("images", "digits"), default=["images", "digits"])
    parser.add_argument("--rounds", type=int, help="3 for the cost, 20 for accuracies")
    parser.add_argument("--multipliers", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(f"{date.today()}, {platform.processor() or platform.machine()}, torch {torch.__version__}")
    if options.utility:
        utility(options.methods, options.rounds or 20, options.multipliers)
    else:
        costs(options.data, options.rounds or 3)


if __name__ == "__main__":
    main()
