"""Share of a round that robust rules take, timed where they run.

    python benchmarks/robust.py
    python benchmarks/robust.py --clients 20 --epochs 5 --rounds 3

The workload is that of FedPAC's Table 1, scaled by the options: random images of CIFAR-10's shape, the paper's CNN,
batches of 50. What is timed is the copy of each update that waits for the end of its round, bounds on norms, and the
judgment of the cohort. The first round is left out. Exits with 1 where a rule takes more than 5 %.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from pfl_lightning import Federation, methods
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.fit.tasks import FitResult
from pfl_lightning.robust import CenteredClipping, CoordinateMedian, GeometricMedian, MultiKrum, Robust, TrimmedMean

MOST = 0.05


class Clock(L.Callback):
    """Sums the time that functions take in the rounds after the first."""

    def __init__(self) -> None:
        self.within = self.whole = self._start = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added."""

        def measured(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.within += time.perf_counter() - start

        return measured

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the first round."""
        if trainer.current_epoch == 1:
            self.within, self._start = 0.0, time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the clock."""
        self.whole = time.perf_counter() - self._start


def share(method: str, rule: Robust, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a round, and the share of it that a rule takes."""
    images = torch.randint(0, 256, (args.clients * args.samples, 3, 32, 32), dtype=torch.uint8)
    own = TensorDataset(images, torch.arange(len(images)) % 10)
    data = FromDatasets(train=own, test=own, partition=IID(args.clients), batch_size=50, validation_share=0.0)
    clock, kept = Clock(), (FitResult.with_own_state, rule.judge, rule.bounded)
    rule.judge, rule.bounded = clock.timed(rule.judge), clock.timed(rule.bounded)  # type: ignore[method-assign]
    FitResult.with_own_state = clock.timed(kept[0])  # type: ignore[method-assign]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=args.rounds + 1,
        callbacks=[clock, FederatedLoop()],
        limit_val_batches=0,
        enable_model_summary=False,
        **quiet,
    )
    try:
        made = partial(getattr(methods, method), lr=0.02, epochs=args.epochs)
        trainer.fit(Federation(made, "fedpac_cnn", robust=rule), datamodule=data)
    finally:
        FitResult.with_own_state = kept[0]  # type: ignore[method-assign]
    return clock.whole / args.rounds, clock.within / clock.whole


def main() -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("clients", 10), ("samples", 600), ("epochs", 5), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    byzantine = (args.clients - 3) // 2
    cases: list[tuple[str, Robust]] = [("FedPAC", MultiKrum(byzantine, colluding=True))]
    averages = (CoordinateMedian(), TrimmedMean(byzantine), GeometricMedian(), CenteredClipping())
    cases += [("FedAvg", rule) for rule in (MultiKrum(byzantine, max_norm=1.0), *averages)]
    warnings.simplefilter("ignore")
    worst = 0.0
    for method, rule in cases:
        seconds, found = share(method, rule, args)
        worst = max(worst, found)
        print(f"{method:8} {rule!r:48} {seconds:8.2f} s a round, {100 * found:5.2f} % of it", flush=True)
    raise SystemExit(worst > MOST)


if __name__ == "__main__":
    main()
