"""Counts of epochs, batches and steps over a client's local fits, and a warning where there are none."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import lightning as L

from pfl_lightning.lightning_private import batches_that_stepped, set_batches_that_stepped

__all__ = ["Counts", "CourseCallback", "names_in_code", "set_counts", "warn_of_counters"]

_PACKAGES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.", "pfl_lightning.")


@dataclass(frozen=True)
class Counts:
    """How far a phase has come, over all rounds of a client.

    Attributes:
        epochs: Local epochs.
        batches: Batches whose gradients were taken; loggers count them.
        steps: Steps of optimizers, as in ``global_step``.
        seen: Batches, as in ``fit_loop.total_batch_idx``.
    """

    epochs: int = 0
    batches: int = 0
    steps: int = 0
    seen: int = 0

    def after(self, epochs: int) -> Counts:
        """The counts some epochs later, under an engine that counts no steps."""
        return replace(self, epochs=self.epochs + epochs)


def set_counts(trainer: L.Trainer, counts: Counts) -> None:
    """Let a Trainer that has just been made be as far as one that has come so far."""
    fit: Any = trainer.fit_loop
    steps = fit.epoch_loop
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.ready = progress.started = progress.processed = progress.completed = counts.epochs
    batches = steps.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = counts.seen
    set_batches_that_stepped(trainer, counts.batches)
    for count in (
        steps.automatic_optimization.optim_progress.optimizer.step.total,
        steps.manual_optimization.optim_step_progress.total,
    ):
        count.ready = count.completed = counts.steps


class CourseCallback(L.Callback):
    """Lets an inner Trainer count on from the client's last fit, and stops it after this fit's epochs.

    ``max_epochs`` and ``max_steps`` become those of all rounds together, by which schedules are laid out.

    Args:
        trainer: The Trainer, made for one phase of one fit.
        before: How far the phase had come.
        rounds: Planned number of rounds; ``None`` where it is unlimited.
    """

    def __init__(self, trainer: L.Trainer, before: Counts, rounds: int | None) -> None:
        assert trainer.max_epochs is not None
        self._epochs, self._steps, self._before = trainer.max_epochs, trainer.max_steps, before
        fit: Any = trainer.fit_loop
        steps = fit.epoch_loop
        # A client is never at its end before its fit: a run may go on for more rounds than were planned.
        least_epochs, least_steps = before.epochs + self._epochs, before.steps + self._steps
        fit.max_epochs = -1 if rounds is None else max(rounds * self._epochs, least_epochs)
        if self._steps != -1:
            steps.max_steps = -1 if rounds is None else max(rounds * self._steps, least_steps)
        set_counts(trainer, before)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Stop after this fit's steps, where they are limited."""
        if self._steps != -1 and trainer.global_step - self._before.steps >= self._steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop after this fit's epochs."""
        progress: Any = trainer.fit_loop.epoch_progress.current
        if progress.processed - self._before.epochs >= self._epochs:
            trainer.should_stop = True

    @staticmethod
    def counts_of(trainer: L.Trainer) -> Counts:
        """How far a Trainer has come."""
        steps = trainer.fit_loop.epoch_loop
        seen = steps.batch_progress.total.ready
        return Counts(trainer.current_epoch, batches_that_stepped(trainer), trainer.global_step, seen)


def warn_of_counters(module: L.LightningModule) -> None:
    """Warn if a module's code asks for its epoch or step: without a Trainer they are always 0."""
    found = sorted(names_in_code(module) & {"current_epoch", "global_step"})
    if found:
        warnings.warn(
            f"{type(module).__name__} asks for {' and '.join(found)}, which SequentialEngine does not count: "
            f"always 0. Use TrainerEngine if it matters",
            stacklevel=2,
        )


def names_in_code(owner: Any, without: tuple[str, ...] = ()) -> set[str]:
    """Names of attributes and functions in what the author of a module's or a callback's class has written.

    Args:
        owner: The module or callback.
        without: What names of methods begin with that are left out.
    """
    of_lightning, replaced = {*dir(L.LightningModule), *dir(L.Callback)}, set[str]()
    waiting: list[CodeType] = []
    for base in type(owner).__mro__:
        if f"{base.__module__}.".startswith(_PACKAGES):
            continue
        for name, value in vars(base).items():
            is_own = inspect.isfunction(value) and (name in of_lightning or not name.startswith("__"))
            if is_own and name not in replaced and not (without and name.startswith(without)):
                waiting.append(inspect.unwrap(value).__code__)
                replaced |= set() if "super" in waiting[-1].co_names else {name}
    found = set[str]()
    while waiting:
        code = waiting.pop()
        found |= {*code.co_names}
        waiting += [one for one in code.co_consts if inspect.iscode(one)]  # of functions and comprehensions in it
    return found
