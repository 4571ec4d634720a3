"""Options of the outer Trainer of a user's project, whose batches are clients and whose epochs are rounds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import validates_within_rounds

__all__ = ["call_with_options", "check_trainer"]

_TRAINING = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


def call_with_options(callbacks: Iterable[Any]) -> str:
    """What has the options of the federation in the user's code: ``federate``, or a FederatedLoop with a method."""
    return "FederatedLoop" if any(getattr(each, "makes_federations", False) for each in callbacks) else "federate"


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse options that a Lightning user means for batches and steps, where the outer Trainer has clients.

    Those that the engine takes have been handed on to it (:mod:`pfl_lightning.drop_in.outer.handed_options`).

    Raises:
        ConfigurationError: Says where each such option belongs.
    """
    options: Any = trainer
    call = call_with_options(options.callbacks)
    found = _shortcut(options, call) or _of_steps(options, call) or _of_the_run(options)
    if found is not None:
        raise ConfigurationError(found)
    _warn_of_profiler(options, call)


def _shortcut(trainer: Any, call: str) -> str | None:
    """What is wrong with an option that sets others, which are not to be named in its place."""
    if trainer.fast_dev_run and trainer.max_steps != -1:
        count = int(trainer.fast_dev_run)
        own = ", ".join(f"{name}={count}" for name in _TRAINING)
        return (
            f"Trainer(fast_dev_run={trainer.fast_dev_run}) would run {count} whole client(s), since a batch of the "
            "outer Trainer is a client: try a round by Trainer(max_epochs=1, logger=False, enable_checkpointing=False) "
            f"and {call}(..., engine=TrainerEngine({own}))"
        )
    if trainer.overfit_batches:
        value = trainer.overfit_batches
        return (
            f"Trainer(overfit_batches={value}) would train {value} of the clients, since a batch of the outer Trainer "
            f"is a client: leave it out there; {call}(..., engine=TrainerEngine(limit_train_batches={value})) takes "
            "so many batches of each client, in their own order"
        )
    return None


def _of_steps(trainer: Any, call: str) -> str | None:
    """What is wrong with options about batches and steps, which the clients take."""
    clipping, accumulated, most = trainer.gradient_clip_val, trainer.accumulate_grad_batches, trainer.max_steps
    algorithm = getattr(trainer.gradient_clip_algorithm, "value", None)
    given = {
        "gradient_clip_val": clipping or None,
        "gradient_clip_algorithm": algorithm,
        "accumulate_grad_batches": None if accumulated == 1 else accumulated,
        "max_steps": None if most == -1 else most,
        **{name: _limit(getattr(trainer, name)) for name in _TRAINING},
    }
    options = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if not options:
        return None
    clients = "FederatedLoop(cohort=...) and (eval_cohort=...) say how many clients a round trains and evaluates"
    limited = any(given[name] is not None for name in _TRAINING)
    rounds = "; rounds are limited by max_epochs" if given["max_steps"] is not None else ""
    return (
        f"Trainer({options}) is about the batches or steps of local fits, which the clients take: leave it out there "
        f"and give it to the engine, {call}(..., engine=TrainerEngine({options})){rounds}"
        f"{f' ({clients})' if limited else ''}"
    )


def _limit(value: int | float) -> int | float | None:
    """A limit of batches that is one: all and none mean the same of clients."""
    return None if value == 0 or (isinstance(value, float) and value == 1.0) else value


def _of_the_run(trainer: Any) -> str | None:
    """What is wrong with options that would act in the middle of a round."""
    if trainer.min_steps is not None:
        return (
            f"Trainer(min_steps={trainer.min_steps}) counts optimizer steps, and the outer Trainer takes none: use "
            "min_epochs, the least number of rounds"
        )
    return validates_within_rounds(trainer)


def _warn_of_profiler(trainer: Any, call: str) -> None:
    if type(trainer.profiler).__name__ != "PassThroughProfiler":
        warnings.warn(
            "Trainer(profiler=...) times rounds and local fits as a whole; what happens inside local fits is timed by "
            f"{call}(..., engine=TrainerEngine(profiler=...))",
            stacklevel=2,
        )
