"""What of the outer Trainer, whose epochs are rounds, is handed into local fits: callbacks and options."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import call_with_options, lightning_kinds, refuse_callback
from pfl_lightning.lightning_private import VALIDATION_TIME, seconds_between_validations, steps_between_checkpoints

_log = logging.getLogger(__name__)

_MOVED = {"WeightAveraging", "BaseFinetuning", "ModelPruning", "LearningRateMonitor"}
"""Callbacks of Lightning that act on a model and its optimizers while it is trained."""

_PACKAGES = ("lightning.", "pytorch_lightning.", "pfl_lightning.")

_OF_BATCHES = (
    *(f"on_{stage}_batch_{place}" for stage in ("train", "validation", "test") for place in ("start", "end")),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
)
"""Hooks that would see clients for batches in the outer Trainer, and those that are not called there."""


def sort_callbacks(
    callbacks: Iterable[L.Callback], gives_trainer: bool, of_module: Sequence[L.Callback] = ()
) -> list[L.Callback]:
    """Say which callbacks of the outer Trainer belong inside local fits, and warn of those that may.

    Args:
        callbacks: Callbacks of the outer Trainer.
        gives_trainer: Whether local fits have a Trainer.
        of_module: Those of them that the module configures itself: with hooks of batches, they are about its batches.

    Returns:
        Those that are to run inside.

    Raises:
        ConfigurationError: One of them cannot be handed in as it is; it says what to do.
    """
    inside, own, by_batches = list[L.Callback](), list(callbacks), list[str]()
    call = call_with_options(own)
    for callback in own:
        refuse_callback(callback, "federate", call)
        hooks = [name for name in _OF_BATCHES if is_own(callback, name)]
        if lightning_kinds(callback) & _MOVED or (gives_trainer and callback in of_module and hooks):
            inside.append(callback)
            continue
        hooks += ["every_n_train_steps"] if steps_between_checkpoints(callback) else []
        if hooks:
            by_batches.append(f"{type(callback).__name__} ({', '.join(hooks)})")
    if inside:
        check_local(inside, gives_trainer)
        names = ", ".join(type(callback).__name__ for callback in inside)
        _log.info("%s: runs inside local fits, a new copy in each, as with %s(..., local_callbacks=)", names, call)
    if by_batches:
        warnings.warn(
            f"{'; '.join(by_batches)}: in the outer Trainer a batch is a client, and there are no training steps "
            f"and no backward pass. For the batches of each client use {call}(..., local_callbacks=[...]), and "
            "every_n_epochs for checkpoints after so many rounds",
            stacklevel=2,
        )
    return inside


def check_local(callbacks: Sequence[L.Callback], gives_trainer: bool) -> None:
    """Refuse callbacks that can have no effect inside local fits.

    Raises:
        ConfigurationError: Local fits have no Trainer, or it is none for them, or cannot be copied.
    """
    for callback in callbacks:
        name, kinds = type(callback).__name__, lightning_kinds(callback)
        if "Callback" not in kinds:
            raise ConfigurationError(f"local_callbacks must be Lightning callbacks, got {callback!r}")
        if not gives_trainer:
            raise ConfigurationError(
                f"{name} runs inside local fits, and this engine has no Trainer there: use TrainerEngine"
            )
        refuse_callback(callback, "inside")
        try:
            copies([callback])
        except Exception as error:  # whatever an object's own copying may raise
            raise ConfigurationError(
                f"each local fit has its own copy of {name}: make what cannot be copied ({error}) in its setup"
            ) from error


def copies(callbacks: Iterable[L.Callback]) -> list[L.Callback]:
    """New copies, without the functions for logging that another Trainer has given them."""
    made = []
    for callback in callbacks:
        attached = [vars(callback)[name] for name in ("log", "log_dict") if name in vars(callback)]
        other = copy.deepcopy(callback, {id(function): None for function in attached})
        for name in ("log", "log_dict"):
            vars(other).pop(name, None)
        made.append(other)
    return made


def sees_evaluations(callback: L.Callback) -> bool:
    """Whether a local callback also runs where a client is validated or tested."""
    if lightning_kinds(callback) & _MOVED:
        return False
    names = {name for name in dir(L.Callback) if name.startswith(("on_validation_", "on_test_"))}
    return any(is_own(callback, name) for name in names)


def is_own(callback: L.Callback, hook: str) -> bool:
    """Whether a hook is the user's own code, not Lightning's or of this package."""
    if hook in vars(callback):  # as in a LambdaCallback
        return True
    owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), L.Callback)
    return not f"{owner.__module__}.".startswith(_PACKAGES)


HANDED: dict[str, tuple[Any, Any]] = {
    "gradient_clip_val": (None, None),
    "gradient_clip_algorithm": (None, "norm"),
    "accumulate_grad_batches": (1, 1),
    "limit_train_batches": (1.0, None),
    "limit_val_batches": (1.0, None),
    "limit_test_batches": (1.0, None),
}
"""Options by name, each with the value by which the outer Trainer does nothing of the kind with clients, and that of an
engine that was not given the option."""


class HandedOptions:
    """Gives an engine what its Trainers are to do with batches, in place of the outer Trainer, until the run ends."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def hand_in(self, trainer: Any, engine: Any) -> None:
        """Hand on what the engine has options for and was not given itself; the rest stays where it is.

        Args:
            trainer: The outer Trainer.
            engine: The engine of the local fits.
        """
        self.give_back()
        if trainer.overfit_batches:  # which has set limits, and means more than these
            return
        for name, (nothing, not_given) in HANDED.items():
            value = getattr(trainer, name)
            value = getattr(value, "value", value)  # of an enumeration
            means_all = value == nothing and type(value) is type(nothing)
            # Without clients there are no batches either: 0 means the same outside.
            if means_all or value == 0 or getattr(engine, name, self) != not_given:
                continue
            self.keep(trainer, name, nothing)
            self.keep(engine, name, value)
        if trainer.fast_dev_run and getattr(engine, "limit_train_batches", None) == trainer.fast_dev_run:
            self.keep(trainer.fit_loop.epoch_loop, "max_steps", -1)  # which fast_dev_run has set: clients

    def leave_out_validation(self, trainer: Any) -> None:
        """Let the outer Trainer know of no validation within an epoch, which a plain run has not without validation."""
        self.keep(trainer, "val_check_interval", 1.0)
        if seconds_between_validations(trainer) is not None:
            self.keep(trainer, VALIDATION_TIME, None)
        if trainer.check_val_every_n_epoch is None:
            self.keep(trainer, "check_val_every_n_epoch", 1)

    def keep(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute have another value until the run ends."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def give_back(self) -> None:
        """Let all have their own options again."""
        while self._before:
            setattr(*self._before.pop())
