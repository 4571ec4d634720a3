"""How a run is going, said after every round."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import loop_of

__all__ = ["RoundProgress"]

COLUMNS = (("round", 11), ("s", 8), ("loss", 9), ("validation, %", 13), ("test, %", 9), ("MB up", 10), ("MB down", 10))
"""Headings and widths of the table; the time that is left comes last."""


@dataclass(frozen=True)
class _Totals:
    """What the run has taken so far: seconds of its rounds, and bytes."""

    seconds: float = 0.0
    up: int = 0
    down: int = 0

    def since(self, before: _Totals) -> _Totals:
        return _Totals(self.seconds - before.seconds, self.up - before.up, self.down - before.down)


class RoundProgress(L.Callback):
    """Says after every round how the run is going.

    Where the output is a terminal, it is a row of a table above Lightning's progress bar; elsewhere, as in a log file,
    a line that says what its numbers are, written at once::

        round 3/30: 0.41 s, loss 1.708, validation 65.62 %, test 46.88 %, 0.30 MB up, 0.29 MB down, 0:00:14 left

    Rounds count from 1. Seconds and bytes are those of the round, without its evaluation. The loss is the clients' mean
    training loss; accuracies are means over the clients that were evaluated after the round, if any were, and those of
    nearest neighbors are called so. The time left is that of the rounds up to ``max_epochs``, if they take as long as
    those so far with their evaluations. The command line adds this callback unless the Trainer has
    ``enable_progress_bar=False``.

    Example:
        >>> from pfl_lightning import FederatedLoop
        >>> from pfl_lightning.callbacks import RoundProgress
        >>> L.Trainer(callbacks=[FederatedLoop(), RoundProgress()], enable_progress_bar=False)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._before, self._summary = _Totals(), dict[str, float]()
        self._start, self._rounds, self._headed = 0.0, 0, False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count from here on."""
        self._before, self._summary = _totals(trainer), {}
        self._start, self._rounds, self._headed = time.perf_counter(), 0, False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what was found until the end of the round."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            assert isinstance(pl_module, Federation)
            self._summary = pl_module.evaluation.summary

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say how the round went."""
        assert isinstance(pl_module, Federation)
        if not loop_of(trainer).aggregated:  # stopped in its middle
            return
        self._rounds += 1
        totals, summary = _totals(trainer), self._summary
        took, loss = totals.since(self._before), loop_of(trainer).loss
        self._before, self._summary = totals, {}
        number, most = trainer.current_epoch + 1, trainer.max_epochs or -1
        round = f"{number}/{most}" if most > 0 else str(number)
        left = self._left(most - number) if most > 0 else ""
        accuracies = [summary.get(f"{part}accuracy/mean", math.nan) for part in ("val_", "test_")]
        neighbors = bool(summary) and pl_module.clients.models[0].uses_knn_evaluation()
        if sys.stdout.isatty():
            texts = [f"{took.seconds:.2f}", _number(loss, "{:.4g}"), *(_number(100 * a, "{:.2f}") for a in accuracies)]
            row = [round, *texts, f"{took.up / 1e6:.2f}", f"{took.down / 1e6:.2f}"]
            self._print_row(trainer, row, left, neighbors)
            return
        said = [f"{took.seconds:.2f} s"]
        said += [] if math.isnan(loss) else [f"loss {loss:.4g}"]
        kind = " (nearest neighbors)" if neighbors else ""
        for part, accuracy in zip(("validation", "test"), accuracies, strict=True):
            said += [] if math.isnan(accuracy) else [f"{part} {100 * accuracy:.2f} %{kind}"]
        said += [f"{name} {summary[name]:.4g}" for name in _shown(pl_module) if name in summary]
        said += [f"{took.up / 1e6:.2f} MB up", f"{took.down / 1e6:.2f} MB down"]
        print(f"round {round}: {', '.join(said)}{f', {left} left' if left else ''}", flush=True)

    def _left(self, rounds: int) -> str:
        """The time that some more rounds take, as hours, minutes and seconds."""
        each = (time.perf_counter() - self._start) / self._rounds
        return str(timedelta(seconds=round(each * rounds)))

    def _print_row(self, trainer: L.Trainer, row: Sequence[str], left: str, neighbors: bool) -> None:
        """Print a row above the progress bar, and the headings above the first one."""
        bar: Any = trainer.progress_bar_callback
        write = bar.print if bar is not None and bar.is_enabled else print
        widths = [width for _, width in COLUMNS]
        if not self._headed:
            self._headed = True
            if neighbors:
                write("Scores of validation and test parts are those of nearest neighbors, not of a classifier.")
            write("".join(f"{heading:>{width}}" for heading, width in COLUMNS) + f"{'left':>10}")
        write("".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) + f"{left:>10}")


def _totals(trainer: L.Trainer) -> _Totals:
    loop = loop_of(trainer)
    return _Totals(loop.seconds, sum(loop.traffic.up.values()), sum(loop.traffic.down.values()))


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


def _shown(federation: Federation) -> list[str]:
    """Names of the values of a user's module that the progress bar shows, as far as the first client has them."""
    first = next(iter((federation.validation_scores or federation.test_scores).values()), None)
    return [] if first is None else sorted(first.progress_bar_names)
