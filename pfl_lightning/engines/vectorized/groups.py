"""Tasks taken in groups: those of one module run at once where that can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.fit.tasks import EvaluationResult, EvaluationTask, FitResult, FitTask

__all__ = ["Groups", "PerModule"]

Task = TypeVar("Task", FitTask, EvaluationTask)
Result = TypeVar("Result", FitResult, EvaluationResult)
Found = TypeVar("Found")


class PerModule(WeakKeyDictionary[FederatedClient, Found]):
    """Findings about modules at run time; a copy of the engine makes its own, for its own modules."""

    def __reduce__(self) -> Any:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PerModule[Found]:
        return type(self)()


class Groups(Generic[Task, Result]):
    """Runs tasks in groups, and in smaller ones after an out-of-memory error.

    Args:
        most: Number of tasks that are taken before the first of them runs.
        log: Logs a line once.
        where: End of what is said of memory, such as ``" in the evaluation"``.

    Attributes:
        at_once: Number of tasks that run at once; less than ``most`` after an out-of-memory error.
    """

    def __init__(self, most: int, log: Callable[[str], None], where: str = "") -> None:
        self._most, self._log, self._where = most, log, where
        self.at_once = most

    def run(
        self,
        tasks: Iterable[tuple[FederatedClient, Task]],
        together: Callable[[FederatedClient, list[Task]], Iterable[Result] | None],
        alone: Callable[[FederatedClient, list[Task]], Iterable[Result]],
        keep: Callable[[Result], Result],
    ) -> Iterator[Result]:
        """Run tasks and yield their results in the tasks' order.

        Args:
            tasks: Modules and their tasks.
            together: Runs a group of one module at once; ``None`` where that cannot be done.
            alone: Runs a group one by one.
            keep: Makes a result last while the next tasks of its module run, before it is yielded.
        """
        waiting = iter(tasks)
        while group := list(islice(waiting, self._most)):
            models = {id(model): model for model, _ in group}
            if len(models) == 1:
                yield from self._run_alike(group[0][0], [task for _, task in group], together, alone)
                continue
            found: dict[int, Result] = {}
            for model in models.values():
                alike = [task for own, task in group if own is model]
                found |= {result.client: keep(result) for result in self._run_alike(model, alike, together, alone)}
            yield from (found[task.context.client] for _, task in group)

    def _run_alike(
        self,
        model: FederatedClient,
        rest: list[Task],
        together: Callable[[FederatedClient, list[Task]], Iterable[Result] | None],
        alone: Callable[[FederatedClient, list[Task]], Iterable[Result]],
    ) -> Iterator[Result]:
        while rest:
            group, fits = rest[: self.at_once], True
            try:
                found = together(model, group)
            except torch.OutOfMemoryError:
                fits = False
            if fits:
                rest = rest[len(group) :]
                yield from alone(model, group) if found is None else found
                continue
            self.at_once = (len(group) + 1) // 2
            count = f"{len(group)} clients at once need too much memory{self._where}"
            self._log(f"{count}; going on with {self.at_once} at once")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
