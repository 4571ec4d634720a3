"""Tasks taken in groups: those of one module run at once where that can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, PaddingError
from pfl_lightning.fit.tasks import EvaluationResult, EvaluationTask, FitEnvironment, FitResult, FitTask

Task = TypeVar("Task", FitTask, EvaluationTask)
Result = TypeVar("Result", FitResult, EvaluationResult)
Together = Callable[[FederatedClient, list[Task], FitEnvironment], Iterable[Result] | None]
Alone = Callable[[Iterable[tuple[FederatedClient, Task]], FitEnvironment], Iterator[Result]]


class Groups:
    """Runs tasks in groups: in smaller ones after an out-of-memory error, one by one where they cannot be vectorized.

    Args:
        most: Number of tasks that are taken before the first of them runs.
        log: Logs a line once.

    Attributes:
        at_once: Number of tasks that run at once; less than ``most`` after an out-of-memory error.
        reasons: Why modules' clients run one by one.
        unpadded: Why their batches are not padded, although the class declares that they can be.
    """

    def __init__(self, most: int, log: Callable[[str], None]) -> None:
        self._most, self._log, self.at_once = most, log, most
        self.reasons, self.unpadded = (WeakKeyDictionary[FederatedClient, str]() for _ in range(2))

    def __reduce__(self) -> Any:
        return type(self), (self._most, self._log)  # findings about modules are of this process

    def run(
        self,
        tasks: Iterable[tuple[FederatedClient, Task]],
        together: Together[Task, Result],
        alone: Alone[Task, Result],
        environment: FitEnvironment,
    ) -> Iterator[Result]:
        """Run tasks and yield their results in the tasks' order.

        Args:
            tasks: Modules and their tasks.
            together: Runs a group of one module at once; ``None``, or CannotVectorizeError, where that cannot be.
            alone: Runs tasks one by one.
            environment: Settings of the outer Trainer and of the run.
        """
        waiting = iter(tasks)
        while group := list(islice(waiting, self._most)):
            models = {id(model): model for model, _ in group}
            found: dict[int, Result] = {}
            for model in models.values():
                alike = [task for own, task in group if own is model]
                results = self._run_alike(model, alike, together, alone, environment)
                if len(models) == 1:
                    yield from results
                for result in results:
                    # It lasts while the next tasks of its module run.
                    kept: Any = result.with_own_state() if isinstance(result, FitResult) else result
                    found[result.client] = kept
            yield from (found[task.context.client] for _, task in group if found)

    def _run_alike(
        self,
        model: FederatedClient,
        rest: list[Task],
        together: Together[Task, Result],
        alone: Alone[Task, Result],
        environment: FitEnvironment,
    ) -> Iterator[Result]:
        while rest:
            group, fits, found = rest[: self.at_once], True, None
            try:
                if len(group) > 1 and model not in self.reasons:
                    found = together(model, group, environment)
            except torch.OutOfMemoryError:
                fits = False
            except PaddingError as error:
                self.unpadded[model] = error.reason
                if not error.silent:
                    self._log(f"batches of {type(model).__name__} are not padded: {error.reason}")
                continue
            except CannotVectorizeError as error:
                self.reasons[model] = error.reason
                if not error.silent:
                    self._log(f"{error.reason}. Its clients run one by one, as under SequentialEngine")
            if fits:
                rest = rest[len(group) :]
                yield from alone(((model, task) for task in group), environment) if found is None else found
                continue
            self.at_once = (len(group) + 1) // 2
            self._log(f"{len(group)} clients at once need too much memory; continuing with {self.at_once} at once")
            getattr(torch.get_device_module(environment.device), "empty_cache", lambda: None)()
