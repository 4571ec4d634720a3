"""What the modules of clients logged in their evaluations, as values of the federation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.drop_in.fits.module_evaluation import as_test_name
from pfl_lightning.drop_in.outer.user_stages import UserStages
from pfl_lightning.metrics import EvalMetrics, over_clients, reduction_of, summarize

__all__ = ["LogsOverClients"]


class LogsOverClients(UserStages):
    """Brings together what the clients' modules logged; a best value of a module is the best of all rounds."""

    monitor: str | None
    """The value of which mean, deviation, least and greatest over the clients are logged."""

    _best: dict[str, float]
    """The best so far, by name, of what a MaxMetric or a MinMetric of the module gave."""

    _said_nothing = _said_replaced = False

    def summary_of(self, prefix: str, scores: Mapping[int, EvalMetrics]) -> dict[str, float]:
        """What the module logged on all samples, what ``monitor`` names over clients, and accuracies where known."""
        before = "novel_" if prefix.startswith("novel_") else ""
        values = {f"{before}{name}": value for name, value in self._over_all_samples(scores).items()}
        name = self._monitored(prefix)
        own = name == f"{prefix}accuracy".removeprefix(before)  # all statistics under a name have one source
        known = {client: s.logged.get(str(name), math.nan) if own else s.accuracy for client, s in scores.items()}
        accuracies = {client: accuracy for client, accuracy in known.items() if not math.isnan(accuracy)}
        if accuracies:
            summary = summarize(list(accuracies), list(accuracies.values()))
            found = {f"{prefix}accuracy/{name}": float(value) for name, value in summary.as_dict().items()}
            self._say_replaced(sorted(values.keys() & found.keys()))
            values |= found
        for key, how in {f"{before}{name}": how for s in scores.values() for name, how in s.best.items()}.items():
            values[key] = self._best_so_far(key, how, values[key])
        watched = np.array([s.logged[name] for s in scores.values() if name is not None and name in s.logged])
        watched = watched if np.isnan(watched).all() else watched[~np.isnan(watched)]
        if len(watched):
            spread = {"mean": watched.mean(), "std": watched.std(), "min": watched.min(), "max": watched.max()}
            values |= {f"{before}{name}/{what}": float(value) for what, value in spread.items()}
        if not values and not self._said_nothing:
            self._said_nothing = True
            warnings.warn(
                f"{type(self.given_module).__name__} logs nothing in its validation or test step, and its forward "
                "does not give class scores for batches (inputs, classes): nothing is known of the clients' models",
                stacklevel=2,
            )
        return values

    def _say_replaced(self, names: list[str]) -> None:
        if names and not self._said_replaced:
            self._said_replaced = True
            warnings.warn(
                f"{type(self.given_module).__name__} logs {', '.join(map(repr, names))}, which is the name of the "
                "accuracies over clients: these replace it. Log it under another name",
                stacklevel=2,
            )

    def _best_so_far(self, name: str, how: str, value: float) -> float:
        """The best of the rounds up to now, of what a MaxMetric or a MinMetric of the module gave in this one."""
        if self.trainer.state.fn != TrainerFn.FITTING or self.trainer.sanity_checking:
            return value
        best = max if how == "max" else min
        self._best[name] = best(self._best.get(name, value), value)
        return self._best[name]

    def get_extra_state(self) -> dict[str, Any]:
        """As of every federation, and the best values so far."""
        return {**super().get_extra_state(), "best": dict(self._best)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""
        super().set_extra_state(state)
        self._best = dict(state.get("best", {}))

    @staticmethod
    def _over_all_samples(scores: Mapping[int, EvalMetrics]) -> dict[str, float]:
        """Values over clients; means are weighted by samples, so that a mean over samples is that over all samples."""
        found = dict[str, float]()
        for name in sorted({name for score in scores.values() for name in score.logged}):
            own = {client: score for client, score in scores.items() if name in score.logged}
            values = {client: score.logged[name] for client, score in own.items()}
            weights = {client: score.samples_of(name) for client, score in own.items()}
            how = {reduction_of(name, score.reductions) for score in own.values()}
            found |= over_clients(name, values, weights, how.pop() if len(how) == 1 else "mean")
        return found

    def _monitored(self, prefix: str) -> str | None:
        if self.monitor is None or not prefix.endswith("test_"):
            return self.monitor
        return as_test_name(self.monitor)
