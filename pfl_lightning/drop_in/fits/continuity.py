"""What goes on from a client's local fit to its next: counts, schedules and the state of optimizers."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.optim import Optimizer

from pfl_lightning.checks import check_choice
from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.fits.optimizers import flat_objects
from pfl_lightning.errors import ConfigurationError

__all__ = ["Continuity", "Course", "CourseCallback", "GoesOn"]


@dataclass(frozen=True)
class Continuity:
    """What of a local fit the same client's next one goes on with.

    Attributes:
        schedule: ``"continue"``: schedulers, ``current_epoch``, ``global_step`` and learning rates go on, over the
            rounds that the client took part in; ``"restart"``: every local fit begins at epoch 0.
        optimizer_state: ``"keep"``: momenta and the like stay with the client; ``"reset"``: every local fit begins
            without them.
    """

    schedule: str = "continue"
    optimizer_state: str = "reset"

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("schedule", self.schedule, ("continue", "restart"))
        check_choice("optimizer_state", self.optimizer_state, ("keep", "reset"))

    @property
    def continues(self) -> bool:
        """Whether counts and schedules go on."""
        return self.schedule == "continue"

    @property
    def keeps(self) -> bool:
        """Whether the state of optimizers stays with the client."""
        return self.optimizer_state == "keep"

    @property
    def carries(self) -> bool:
        """Whether anything goes on."""
        return self.continues or self.keeps


@dataclass(frozen=True)
class Counts:
    """How far a phase has come, over all rounds of a client.

    Attributes:
        epochs: Local epochs.
        batches: Batches whose gradients were taken; loggers count them.
        steps: Steps of optimizers, as in ``global_step``.
    """

    epochs: int = 0
    batches: int = 0
    steps: int = 0

    def after(self, epochs: int) -> Counts:
        """The counts some epochs later, under an engine that counts no steps."""
        return replace(self, epochs=self.epochs + epochs)


class Course:
    """What the phases of a local fit take over from the client's last one, and hand on to its next.

    Each phase goes on with what the phase at its place in the last fit has handed on.

    Args:
        settings: What goes on.
        content: What the client's last fit has handed on; empty before its first.
        name: Of the module, for messages.
    """

    def __init__(self, settings: Continuity, content: bytes, name: str) -> None:
        self.settings, self._name = settings, name
        self._before: list[dict[str, Any]] = _decoded(content, name) if content else []
        self._after: list[dict[str, Any]] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[Any] = []

    @property
    def _earlier(self) -> dict[str, Any]:
        """What the current phase goes on with."""
        index = len(self._after)
        return self._before[index] if index < len(self._before) else {}

    @property
    def counts(self) -> Counts:
        """How far the current phase had come before this fit."""
        return Counts(*self._earlier.get("counts", ()))

    @property
    def changed(self) -> dict[str, bool]:
        """What the current phase has frozen, thawed or set into a mode before this fit."""
        return dict(self._earlier.get("changed", {}))

    def take_over(self, configured: Any) -> None:
        """Let what ``configure_optimizers`` returned go on.

        Raises:
            ConfigurationError: It has other optimizers, groups or schedulers than in the client's last fit.
        """
        found = list(flat_objects(configured))
        self._optimizers = [each for each in found if isinstance(each, Optimizer)]
        self._schedulers = [each for each in found if not isinstance(each, Optimizer) and hasattr(each, "state_dict")]
        if not self._earlier:
            return
        optimizers, schedulers = self._earlier["optimizers"], self._earlier["schedulers"]
        try:
            if len(optimizers) != len(self._optimizers):
                raise ValueError(f"{len(optimizers)} optimizers then, {len(self._optimizers)} now")
            if self.settings.continues and self._earlier["counts"]:
                for scheduler, state in zip(self._schedulers, schedulers, strict=True):
                    scheduler.load_state_dict(state)
            for optimizer, state in zip(self._optimizers, optimizers, strict=True):
                taken = state if self.settings.continues else {"state": state["state"]}
                optimizer.load_state_dict({**optimizer.state_dict(), **taken})
        except (ValueError, KeyError) as error:
            raise ConfigurationError(
                f"what {self._name}.configure_optimizers returns differs from the client's last local fit ({error}), "
                "so that it cannot go on: let it return the same optimizers, groups and schedulers at every call, or "
                "use federate(..., schedule='restart', optimizer_state='reset')"
            ) from error

    def finish_phase(self, counts: Counts, changed: dict[str, bool] | None = None) -> None:
        """Note how far the current phase has come, and what its module has changed; the next one begins."""
        continues, keeps = self.settings.continues, self.settings.keeps
        optimizers = []
        for optimizer in self._optimizers:
            state = optimizer.state_dict()
            state = {"state": state["state"] if keeps else {}, "param_groups": state["param_groups"]}
            optimizers.append(state if continues else {"state": state["state"]})
        self._after.append(
            {
                "counts": (counts.epochs, counts.batches, counts.steps) if continues else (),
                "optimizers": optimizers,
                "schedulers": [each.state_dict() for each in self._schedulers] if continues else [],
                "changed": changed or {} if continues else {},
            }
        )
        self._optimizers, self._schedulers = [], []

    def encoded(self) -> bytes:
        """What the fit hands on."""
        file = io.BytesIO()
        torch.save(_plain(self._after), file)
        return file.getvalue()


class GoesOn(FederatedClient):
    """A client whose local fits go on where its last one ended, as far as :attr:`continuity` says."""

    continuity = Continuity("restart", "reset")
    course: Course | None = None
    """Of the fit under way; ``None`` where nothing goes on, as in a fine-tuning before an evaluation."""

    @property
    def carried(self) -> bytes | None:  # type: ignore[override]  # where it is set, it is unpacked
        """What the fit hands on to the client's next."""
        return None if self.course is None else self.course.encoded()

    @carried.setter
    def carried(self, content: bytes | None) -> None:
        name = type(self.step_module).__name__
        self.course = None if content is None else Course(self.continuity, content, name)


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
        for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
            progress.ready = progress.started = progress.processed = progress.completed = before.epochs
        steps._batches_that_stepped = before.batches
        for count in (
            steps.automatic_optimization.optim_progress.optimizer.step.total,
            steps.manual_optimization.optim_step_progress.total,
        ):
            count.ready = count.completed = before.steps

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
        return Counts(trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.global_step)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which are read without running code."""
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items()) if type(value) is dict else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def _decoded(content: bytes, name: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever class: an object that is no tensor, number, list or dictionary
        reason = str(error).strip().splitlines()
        raise ConfigurationError(
            f"a scheduler or an optimizer of {name} keeps objects in its state_dict that are not stored for clients "
            f"({reason[-1] if reason else type(error).__name__}): let it keep tensors, numbers, strings, lists and "
            "dictionaries, or use federate(..., schedule='restart', optimizer_state='reset')"
        ) from error
    return found
