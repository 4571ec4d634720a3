"""What goes on from a client's local fit to its next: counts, schedules, states of optimizers, and what is frozen.

It works under every engine, also without a Trainer, and does not go through Lightning's checkpoints (decision 50). The
bytes of each client rest in ``state.clients.ResumeStates``, and in checkpoints of the federation under ``"carried"``.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer

from pfl_lightning.checks import check_choice
from pfl_lightning.datamodules.adapters.workers import Values
from pfl_lightning.drop_in.fits.module_calls import flat_objects, training
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.lightning_private import batches_that_stepped, set_batches_that_stepped
from pfl_lightning.state.checkpoints import python_numbers

Modes = dict[str, bool]
"""``requires_grad`` by the names of parameters, and the training mode of layers by names with a final dot."""

Metrics = dict[str, dict[str, float]]
"""Logged values by name, by the name under which a Trainer has them."""


@dataclass(frozen=True)
class Continuity:
    """What a client's next local fit continues from.

    Attributes:
        schedule: ``"continue"``: schedulers, ``current_epoch``, ``global_step`` and learning rates go on, over the
            rounds that the client took part in; ``"restart"``: every local fit begins at epoch 0.
        optimizer_state: ``"keep"``: momenta and the like stay with the client; ``"reset"``: every local fit begins
            without them.
    """

    schedule: str
    optimizer_state: str

    def __post_init__(self) -> None:
        """Check the options."""
        if self.schedule == "rounds":
            raise ConfigurationError(
                "schedule='rounds' is for built-in methods: a LightningModule's schedules may also follow metrics and "
                "thawed layers, which are unknown for rounds without the client; use 'continue', which is the same "
                "if every client takes part in every round"
            )
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

    @staticmethod
    def of(trainer: L.Trainer) -> Counts:
        """How far a Trainer has come."""
        seen = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return Counts(trainer.current_epoch, batches_that_stepped(trainer), trainer.global_step, seen)


def set_counts(trainer: L.Trainer, counts: Counts) -> None:
    """Let a Trainer that has just been made be as far as one that has come so far."""
    fit: Any = trainer.fit_loop
    steps = fit.epoch_loop
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.ready = progress.started = progress.processed = progress.completed = counts.epochs
    batches = steps.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = counts.seen
    set_batches_that_stepped(trainer, counts.batches)
    automatic, manual = steps.automatic_optimization.optim_progress, steps.manual_optimization.optim_step_progress
    for count in (automatic.optimizer.step.total, manual.total):
        count.ready = count.completed = counts.steps


@dataclass
class PhaseRecord:
    """What one phase of a local fit hands on.

    Attributes:
        counts: Fields of :class:`Counts`; empty where every fit begins at epoch 0.
        optimizers: Their ``state_dict``, each without what does not go on.
        schedulers: Their ``state_dict``.
        changed: What the phase has frozen, thawed or set into a mode.
        metrics: What the Trainer had of logged values, where the module reads them.
        trained: ``requires_grad`` by names, as the optimizers were made for the last time.
        datasets: Plain attributes of divided data sets as the phase has left them; empty where they are the first.
    """

    counts: tuple[int, ...] = ()
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    changed: Modes = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    trained: dict[str, bool] = field(default_factory=dict)
    datasets: Values = field(default_factory=list)


class FitProgress:
    """What the phases of a local fit take over from the client's last one, and hand on to its next.

    Each phase continues from what the phase at its place in the last fit has handed on.

    Args:
        settings: What goes on.
        content: What the client's last fit has handed on; empty before its first.
        name: Of the module, for messages.
    """

    def __init__(self, settings: Continuity, content: bytes, name: str) -> None:
        self.settings, self._name = settings, name
        self._before = [PhaseRecord(**each) for each in _decoded(content, name)] if content else []
        self._after: list[PhaseRecord] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[Any] = []
        self._has_taken_over, self._trained = False, dict[str, bool]()

    @property
    def earlier(self) -> PhaseRecord:
        """What the current phase continues from."""
        index = len(self._after)
        return self._before[index] if index < len(self._before) else PhaseRecord()

    @property
    def counts(self) -> Counts:
        """How far the current phase had come before this fit."""
        return Counts(*self.earlier.counts)

    def keep_datasets(self, values: Values) -> None:
        """Note what the phase that has just finished has left in attributes of divided data sets."""
        if self.settings.continues and self._after:
            self._after[-1].datasets = values

    def as_last_made(self, module: nn.Module) -> AbstractContextManager[None]:
        """While a phase makes its first optimizers, let train what did when the last fit made its last ones.

        They differ where a module thaws a part and sets its optimizers up once more.
        """
        return training(module, {} if self._has_taken_over else self.earlier.trained)

    def take_over(self, configured: Any, module: nn.Module) -> None:
        """Let what ``configure_optimizers`` returned go on.

        Only what it returns first in a phase does. A module that sets its optimizers up once more, after it has thawed
        a part, gets new ones; the client's next fit continues with these, unless it starts at epoch 0 again.

        Raises:
            ConfigurationError: It has other optimizers, groups or schedulers than in the client's last fit.
        """
        again, self._has_taken_over = self._has_taken_over, True
        if again and not self.settings.continues:
            return
        found = list(flat_objects(configured))
        self._optimizers = [each for each in found if isinstance(each, Optimizer)]
        self._schedulers = [each for each in found if not isinstance(each, Optimizer) and hasattr(each, "state_dict")]
        if again:
            self._trained = {name: p.requires_grad for name, p in module.named_parameters()}
        elif len(self._after) < len(self._before):
            self._load(self.earlier)

    def _load(self, earlier: PhaseRecord) -> None:
        continues = self.settings.continues
        try:
            if len(earlier.optimizers) != len(self._optimizers):
                raise ValueError(f"{len(earlier.optimizers)} optimizers then, {len(self._optimizers)} now")
            if continues and earlier.counts:
                for scheduler, state in zip(self._schedulers, earlier.schedulers, strict=True):
                    scheduler.load_state_dict(state)
            for optimizer, state in zip(self._optimizers, earlier.optimizers, strict=True):
                taken = state if continues else {"state": state["state"]}
                optimizer.load_state_dict({**optimizer.state_dict(), **taken})
        except (ValueError, KeyError) as error:
            raise ConfigurationError(
                f"what {self._name}.configure_optimizers returns differs from the client's last local fit ({error}), "
                "so it cannot continue: let it return the same optimizers, groups and schedulers at every call, "
                "or use federate(..., schedule='restart', optimizer_state='reset')"
            ) from error

    def finish_phase(self, counts: Counts, changed: Modes | None = None, metrics: Metrics | None = None) -> None:
        """Note how far the current phase has come, what its module has changed and reads; the next one begins."""
        states = [each.state_dict() for each in self._optimizers]
        kept = [each["state"] if self.settings.keeps else {} for each in states]
        trained = self._trained or self.earlier.trained
        if self.settings.continues:
            optimizers = [{"state": s, "param_groups": o["param_groups"]} for s, o in zip(kept, states, strict=True)]
            schedulers = [each.state_dict() for each in self._schedulers]
            record = PhaseRecord(astuple(counts), optimizers, schedulers, changed or {}, metrics or {}, trained)
        else:
            record = PhaseRecord(optimizers=[{"state": state} for state in kept], trained=trained)
        self._after.append(record)
        self._optimizers, self._schedulers = [], []
        self._has_taken_over, self._trained = False, {}

    def skip_phase(self) -> None:
        """Hand on what the current phase would have used next; the next one begins."""
        self._after.append(self.earlier)

    def finish_phase_without_trainer(self, epochs: int) -> None:
        """The same under an engine that counts no steps."""
        self.finish_phase(replace(self.counts, epochs=self.counts.epochs + epochs))

    def encoded(self) -> bytes:
        """What the fit hands on."""
        file = io.BytesIO()
        torch.save(python_numbers([vars(record) for record in self._after]), file)
        return file.getvalue()


class Resumption(L.Callback):
    """Lets an inner Trainer continue from the client's last fit, and stops it after this fit's epochs and steps.

    ``max_epochs`` and ``max_steps`` become those of all rounds together, by which schedules are laid out.

    A plain run calls ``on_fit_start`` and ``on_train_start`` once, and a module that thaws a part at one epoch leaves
    it thawed. Here every local fit calls them, and what they set is taken back before its first epoch; optimizers are
    made before, as in the first fit.

    Args:
        trainer: The Trainer, made for one phase of one fit.
        progress: How far the client's phase had come.
        rounds: Planned number of rounds; ``None`` where it is unlimited.
    """

    def __init__(self, trainer: L.Trainer, progress: FitProgress, rounds: int | None) -> None:
        assert trainer.max_epochs is not None
        self._epochs, self._steps, self._before = trainer.max_epochs, trainer.max_steps, progress.counts
        fit: Any = trainer.fit_loop
        # A client is never at its end before its fit: a run may go on for more rounds than were planned.
        least_epochs, least_steps = self._before.epochs + self._epochs, self._before.steps + self._steps
        fit.max_epochs = -1 if rounds is None else max(rounds * self._epochs, least_epochs)
        if self._steps != -1:
            fit.epoch_loop.max_steps = -1 if rounds is None else max(rounds * self._steps, least_steps)
        set_counts(trainer, self._before)
        self._modes, self._begun = progress.earlier.changed, False
        self._start, self.changed = Modes(), Modes()  # the latter: what of the end differs from before the first epoch

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the first epoch, set what the last fit has left."""
        if self._begun:
            return
        self._begun, self._start = True, _modes(pl_module)
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_(self._modes.get(name, parameter.requires_grad))
        for name, layer in pl_module.named_modules():
            layer.training = self._modes.get(f"{name}.", layer.training)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Stop after this fit's steps, where they are limited."""
        if self._steps != -1 and trainer.global_step - self._before.steps >= self._steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop after this fit's epochs."""
        progress: Any = trainer.fit_loop.epoch_progress.current
        if progress.processed - self._before.epochs >= self._epochs:
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what the fit has changed, but not what hooks of its end do."""
        if any("BaseFinetuning" in lightning_kinds(callback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return  # which thaw again by themselves
        end = _modes(pl_module)
        self.changed = {name: value for name, value in end.items() if self._start.get(name, value) != value}


def _modes(module: L.LightningModule) -> Modes:
    modes = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return modes | {f"{name}.": layer.training for name, layer in module.named_modules()}


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
