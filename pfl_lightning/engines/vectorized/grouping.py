"""Tasks of several architectures, taken so that those of one module run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.tasks import EvaluationResult, EvaluationTask, FitResult, FitTask

__all__ = ["run_by_module"]

Task = TypeVar("Task", FitTask, EvaluationTask)
Result = TypeVar("Result", FitResult, EvaluationResult)


def run_by_module(
    tasks: Iterable[tuple[FederatedClient, Task]],
    at_once: int,
    run_alike: Callable[[FederatedClient, list[Task]], Iterator[Result]],
    keep: Callable[[Result], Result],
) -> Iterator[Result]:
    """Run tasks, those of one module together, and yield their results in the tasks' order.

    Args:
        tasks: Modules and their tasks.
        at_once: Number of tasks that are taken before the first of them runs.
        run_alike: Runs the tasks of one module.
        keep: Makes a result last while the next tasks of its module run, before it is yielded.
    """
    waiting = iter(tasks)
    while group := list(islice(waiting, at_once)):
        models = {id(model): model for model, _ in group}
        if len(models) == 1:
            yield from run_alike(group[0][0], [task for _, task in group])
            continue
        found: dict[int, Result] = {}
        for model in models.values():
            for result in run_alike(model, [task for own, task in group if own is model]):
                found[result.client] = keep(result)
        yield from (found[task.context.client] for _, task in group)
