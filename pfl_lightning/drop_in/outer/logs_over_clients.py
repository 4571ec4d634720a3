"""What the modules of clients logged in their evaluations, as values of the federation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import numpy as np

from pfl_lightning.drop_in.fits.local_evaluation import as_test_name
from pfl_lightning.metrics import EvalMetrics, over_clients, reduction_of, summarize
from pfl_lightning.notices import Names


class LogsOverClients:
    """Brings together what the clients' modules logged; a best value of a module is the best of all rounds.

    Args:
        module: Name of the module's class.
        monitor: The value of which mean, deviation, least and greatest over the clients are logged.

    Attributes:
        best: The best so far, by name, of what a MaxMetric or a MinMetric of the module gave.
    """

    def __init__(self, module: str, monitor: str | None) -> None:
        self._module, self.monitor = module, monitor
        self.best: dict[str, float] = {}
        self._warned: set[str] = set()

    def summary_of(
        self, prefix: str, scores: Mapping[int, EvalMetrics], trains: bool, names: Names = None
    ) -> dict[str, float]:
        """What the module logged on all samples, what ``monitor`` names over clients, and accuracies where known.

        Args:
            prefix: In front of names, such as ``"novel_test_"``.
            scores: Of each client.
            trains: Whether this is an evaluation of a round, so that the best of the rounds counts.
            names: Names of the clients.
        """
        before, name = "novel_" if prefix.startswith("novel_") else "", self.monitor
        if name is not None and prefix.endswith("test_"):
            name = as_test_name(name)
        values = dict[str, float]()
        for key in sorted({key for score in scores.values() for key in score.logged}):
            have = {client: score for client, score in scores.items() if key in score.logged}
            logged = {client: score.logged[key] for client, score in have.items()}
            # Means are weighted by samples, so that a mean over samples is that over all samples.
            weights = {client: score.samples_of(key) for client, score in have.items()}
            ways = {reduction_of(key, score.reductions) for score in have.values()}
            over_all = over_clients(key, logged, weights, ways.pop() if len(ways) == 1 else "mean", names)
            values |= {f"{before}{key}": value for key, value in over_all.items()}
        own = name == f"{prefix}accuracy".removeprefix(before)  # all statistics under a name have one source
        known = {client: s.logged.get(str(name), math.nan) if own else s.accuracy for client, s in scores.items()}
        accuracies = {client: accuracy for client, accuracy in known.items() if not math.isnan(accuracy)}
        if accuracies:
            samples = {client: score.num_samples for client, score in scores.items()}
            summary = summarize(accuracies, samples)
            found = {f"{prefix}accuracy/{name}": float(value) for name, value in summary.as_dict().items()}
            replaced = ", ".join(map(repr, sorted(values.keys() & found.keys())))
            if replaced:
                self._warn_once(f"{self._module} logs {replaced}, which the accuracies over clients replace: rename it")
            values |= found
        for key, how in {f"{before}{name}": how for s in scores.values() for name, how in s.best.items()}.items():
            if trains:
                best = max if how == "max" else min
                values[key] = self.best[key] = best(self.best.get(key, values[key]), values[key])
        watched = np.array([s.logged[name] for s in scores.values() if name is not None and name in s.logged])
        watched = watched if np.isnan(watched).all() else watched[~np.isnan(watched)]
        for what in ("mean", "std", "min", "max") if len(watched) else ():
            values[f"{before}{name}/{what}"] = float(getattr(watched, what)())
        if not values:
            self._warn_once(
                f"{self._module} logs nothing in its validation or test step, and its forward does not give class "
                "scores for batches (inputs, classes), so clients have no results: call self.log in these steps"
            )
        return values

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)
