"""How a run is going, printed after every round."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.federation.loop import loop_of


class RoundProgress(L.Callback):
    """Callback that prints a line after every round, above Lightning's progress bar where there is one.

    Example::

        round 3/30: 0.41 s, loss 1.708, validation 65.62 %, test 46.88 %, 0.30 MB up, 0.29 MB down, 0:00:14 left

    Rounds count from 1. Seconds and bytes are those of the round, without its evaluation. The loss is the clients' mean
    training loss; accuracies are means over the clients that were evaluated after the round, if any were, and those of
    nearest neighbors, or of honest clients under an :class:`Attack`, are called so. With privacy, epsilon so far
    follows the bytes. The time left is that of the rounds up to ``max_epochs``, if they take as long as those so far
    with their evaluations. The command line adds this callback unless the Trainer has ``enable_progress_bar=False``.

    Example:
        >>> from pfl_lightning import FederatedLoop
        >>> from pfl_lightning.callbacks import RoundProgress
        >>> L.Trainer(callbacks=[FederatedLoop(), RoundProgress()], enable_progress_bar=False)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._before, self._summary = (0.0, 0.0, 0.0), dict[str, float]()
        self._start, self._rounds = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the count of rounds and seconds."""
        self._before, self._summary = _totals(trainer), {}
        self._start, self._rounds = time.perf_counter(), 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keep the accuracies until the end of the round."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._summary = pl_module.evaluation.summary

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Print the round's line."""
        if not loop_of(trainer).aggregated:  # stopped in its middle
            return
        self._rounds += 1
        totals, summary, loss = _totals(trainer), self._summary, loop_of(trainer).loss
        seconds, up, down = (now - before for now, before in zip(totals, self._before, strict=True))
        self._before, self._summary = totals, {}
        parts = [f"{seconds:.2f} s"]
        parts += [] if loop_of(trainer).clock is None else [f"simulated until {loop_of(trainer).clock:.6g} s"]
        parts += [] if math.isnan(loss) else [f"loss {loss:.4g}"]
        neighbors = bool(summary) and pl_module.clients.models[0].uses_knn_evaluation()
        whose = " of honest clients" if pl_module.lying else ""
        for part, prefix in (("validation", "val_"), ("test", "test_")):
            accuracy = summary.get(f"{prefix}accuracy/mean", math.nan)
            if not math.isnan(accuracy):
                parts.append(f"{part} {100 * accuracy:.2f} %{' (nearest neighbors)' if neighbors else ''}{whose}")
        first = next(iter((pl_module.validation_scores or pl_module.test_scores).values()), None)
        named = [] if first is None else sorted(first.progress_bar_names)  # the module has logged these for the bar
        parts += [f"{name} {summary[name]:.4g}" for name in named if name in summary]
        parts += [f"{up / 1e6:.2f} MB up", f"{down / 1e6:.2f} MB down"]
        if pl_module.mechanism is not None:
            parts.append(f"epsilon {pl_module.mechanism.epsilon():.3g}")
        number, most = trainer.current_epoch + 1, trainer.max_epochs or -1
        if most > 0:
            each = (time.perf_counter() - self._start) / self._rounds
            parts.append(f"{timedelta(seconds=round(each * (most - number)))} left")
        line = f"round {number}{f'/{most}' if most > 0 else ''}: {', '.join(parts)}"
        bar: Any = trainer.progress_bar_callback
        if bar is not None and bar.is_enabled and sys.stdout.isatty():
            bar.print(line)
        else:
            print(line, flush=True)


def _totals(trainer: L.Trainer) -> tuple[float, float, float]:
    """What the run has taken so far: seconds of its rounds, and bytes up and down."""
    loop = loop_of(trainer)
    return loop.seconds, sum(loop.traffic.up.values()), sum(loop.traffic.down.values())
