"""Tasks taken in groups: those of one module run at once where that can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError
from pfl_lightning.fit.tasks import EvaluationResult, EvaluationTask, FitResult, FitTask

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
    """Runs tasks in groups: in smaller ones after an out-of-memory error, one by one where they cannot be vectorized.

    Args:
        most: Number of tasks that are taken before the first of them runs.
        log: Logs a line once.
        done: What is done with clients, ``"trained"`` or ``"evaluated"``.

    Attributes:
        at_once: Number of tasks that run at once; less than ``most`` after an out-of-memory error.
        reasons: Why modules' clients run one by one.
    """

    def __init__(self, most: int, log: Callable[[str], None], done: str) -> None:
        self._most, self._log, self._done = most, log, done
        self.at_once = most
        self.reasons = PerModule[str]()

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
            together: Runs a group of one module at once; ``None``, or CannotVectorizeError, where that cannot be.
            alone: Runs a group one by one.
            keep: Makes a result last while the next tasks of its module run, before it is yielded.
        """
        waiting = iter(tasks)
        while group := list(islice(waiting, self._most)):
            models = {id(model): model for model, _ in group}
            found: dict[int, Result] = {}
            for model in models.values():
                alike = [task for own, task in group if own is model]
                results = self._run_alike(model, alike, together, alone)
                if len(models) == 1:
                    yield from results
                found |= {result.client: keep(result) for result in results}
            yield from (found[task.context.client] for _, task in group if found)

    def _run_alike(
        self,
        model: FederatedClient,
        rest: list[Task],
        together: Callable[[FederatedClient, list[Task]], Iterable[Result] | None],
        alone: Callable[[FederatedClient, list[Task]], Iterable[Result]],
    ) -> Iterator[Result]:
        while rest:
            group, fits, found = rest[: self.at_once], True, None
            try:
                if len(group) > 1 and model not in self.reasons:
                    found = together(model, group)
            except torch.OutOfMemoryError:
                fits = False
            except CannotVectorizeError as error:
                self.note(model, error)
            if fits:
                rest = rest[len(group) :]
                yield from alone(model, group) if found is None else found
                continue
            self.at_once = (len(group) + 1) // 2
            count = f"{len(group)} clients {self._done} at once need too much memory"
            self._log(f"{count}; going on with {self.at_once} at once")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def note(self, model: FederatedClient, error: CannotVectorizeError) -> None:
        """Let a module's clients run one by one from now on, and say why."""
        self.reasons[model] = error.reason
        if not error.silent:
            self._log(f"{error.reason}. Its clients are {self._done} one by one, as under SequentialEngine")
