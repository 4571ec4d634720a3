"""Callbacks and options of Lightning that mean something else, or nothing, in the outer Trainer.

Its batches are clients, its epochs are rounds, and it trains no model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any, Literal

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.lightning_private import end_after_epochs, seconds_between_validations

Place = Literal["Federation", "federate", "inside"]
"""The outer Trainer of a method's own clients, that of a user's module, and local fits."""

_SEARCHES = ("BatchSizeFinder", "LearningRateFinder")
_TRAINING = ("GradientAccumulationScheduler", "StochasticWeightAveraging", "WeightAveraging", "ModelPruning")
_BATCHES = ("GradientAccumulationScheduler", "SpikeDetection", "ThroughputMonitor")
_SEARCH = "run it with your module and a plain Trainer first, and give the federation what it found"
_AVERAGING = "it averages over epochs of one fit, and local fits have few: use EMAWeightAveraging"
_LOCAL = "leave it out here and use {call}(..., engine=TrainerEngine(callbacks=[{name}(...)]))"
_REFUSED: dict[Place, dict[str, str]] = {
    "Federation": dict.fromkeys(_SEARCHES, _SEARCH) | dict.fromkeys((*_TRAINING, "BaseFinetuning"), _LOCAL),
    "federate": dict.fromkeys(_BATCHES, "leave it out here and use {call}(..., local_callbacks=[{name}(...)])")
    | {"StochasticWeightAveraging": _AVERAGING},
    "inside": dict.fromkeys(
        (*_SEARCHES, "Checkpoint", "ProgressBar"),
        "inside local fits, which are silent and save nothing, it has nothing to do: give it to the outer Trainer's "
        "callbacks, or leave it out",
    )
    | {"StochasticWeightAveraging": _AVERAGING},
}
"""What to do with callbacks of Lightning that are refused, by the place and the name of their class."""

_OPTIONS = {
    "fast_dev_run": (
        "Trainer(max_epochs=1, logger=False, enable_checkpointing=False) and {call}(..., engine=TrainerEngine("
        "limit_train_batches={value:d}, limit_val_batches={value:d}, limit_test_batches={value:d})), a round of a "
        "few batches of each client"
    ),
    "overfit_batches": (
        "{call}(..., engine=TrainerEngine(limit_train_batches={value})) for so many batches of each client, and "
        "FederatedLoop(cohort=...) for the number of clients"
    ),
    "min_steps": "min_epochs, the least number of rounds",
    "check_val_every_n_epoch": "at least 1, or limit_val_batches=0 for no validation",
    "reload_dataloaders_every_n_epochs": (
        "an attribute by which the Dataset follows self.trainer.current_epoch of the module: clients keep the items "
        "of the first loaders"
    ),
    "val_check_interval": "check_val_every_n_epoch, which counts rounds: within a round nothing is aggregated yet",
}
"""What to use in the place of options of the outer Trainer, beside those that an engine takes."""

_FORMER_METRIC = re.compile(r"(novel_)?((?:accuracy|loss)/(?:mean|std|worst_decile|best|worst|lower|upper))")
"""Names that metrics of the validation parts had in earlier versions."""

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


def call_with_options(callbacks: Iterable[Any]) -> str:
    """What has the options of the federation in the user's code: ``federate``, or a FederatedLoop with a method."""
    return "FederatedLoop" if any(getattr(each, "makes_federations", False) for each in callbacks) else "federate"


def refuse_callback(callback: Any, place: Place, call: str = "federate") -> None:
    """Refuse a callback that could only fail or do nothing in a place, or watches a metric by its former name.

    Raises:
        ConfigurationError: Names the callback and what to do in its place.
    """
    for kind in lightning_kinds(callback) & _REFUSED[place].keys():
        name = type(callback).__name__
        raise ConfigurationError(
            f"{name} is for the steps and batches of a plain training run, and those of a federation are in its local "
            f"fits: {_REFUSED[place][kind].format(name=name, call=call)}"
        )
    former = _FORMER_METRIC.fullmatch(str(getattr(callback, "monitor", ""))) if place == "Federation" else None
    if former:
        now = f"{former[1] or ''}val_{former[2]}"
        raise ConfigurationError(
            f"{type(callback).__name__} watches {former[0]!r}, which is called {now!r} now: set monitor={now!r}"
        )


def check_options(trainer: Any, call: str = "Federation") -> None:
    """Refuse options that a Lightning user means for batches and steps, where the outer Trainer has clients.

    Args:
        trainer: The outer Trainer.
        call: What has the options of the federation in the user's code. With a user's module, limits of batches are
            refused, too, which the engine has not taken over (:mod:`pfl_lightning.drop_in.outer.handed_in`).

    Raises:
        ConfigurationError: Says where each such option belongs.
    """
    with_module, validates = call != "Federation", trainer.limit_val_batches != 0
    interval, seconds = getattr(trainer, "val_check_interval", 1.0), seconds_between_validations(trainer)
    usual = seconds is None and (interval == 0 or (isinstance(interval, float) and interval == 1.0))
    values = {
        "fast_dev_run": with_module and trainer.max_steps != -1 and trainer.fast_dev_run,  # the engine has not taken it
        "overfit_batches": trainer.overfit_batches,
        "min_steps": trainer.min_steps,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch == 0 and "0",
        "reload_dataloaders_every_n_epochs": with_module and trainer.reload_dataloaders_every_n_epochs,
        "val_check_interval": not usual and validates and (interval if seconds is None else f"{seconds} s"),
    }
    refused = {name: value for name, value in values.items() if value}
    if not refused.keys() & {"fast_dev_run", "overfit_batches"}:  # which set others, not to be named in their place
        _check_options_of_fits(trainer, call)
    often, rounds = trainer.check_val_every_n_epoch, trainer.max_epochs
    if validates and often and rounds and 0 < rounds < often:
        warnings.warn(
            f"check_val_every_n_epoch={often} is more than the {rounds} rounds of max_epochs: no round is evaluated. "
            f"Set it to {rounds} or less",
            stacklevel=2,
        )
    for name, value in refused.items():
        raise ConfigurationError(
            f"Trainer({name}={value}) means something else where a batch is a client and an epoch is a round: use "
            f"{_OPTIONS[name].format(value=value, call=call)}"
        )


def _check_options_of_fits(trainer: Any, call: str) -> None:
    """Refuse options about gradients, batches and steps, which the clients take."""
    clipping, accumulated, most = trainer.gradient_clip_val or None, trainer.accumulate_grad_batches, trainer.max_steps
    with_module = call != "Federation"
    algorithm = trainer.gradient_clip_algorithm if with_module or clipping else None
    limits = {name: getattr(trainer, name) for name in _LIMITS if with_module}
    given = {
        "gradient_clip_val": clipping,
        "gradient_clip_algorithm": getattr(algorithm, "value", None),
        "accumulate_grad_batches": None if accumulated == 1 else accumulated,
        "max_steps": None if most == -1 or trainer.fast_dev_run else most,  # which sets max_steps
        # All and none mean the same of clients.
        **{name: limit for name, limit in limits.items() if limit != 0 and not (type(limit) is float and limit == 1)},
    }
    options = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if options:
        raise ConfigurationError(
            f"Trainer({options}) is about the gradients, batches or steps of local fits: leave it out there and "
            f"pass it to the engine, {call}(..., engine=TrainerEngine({options})) (every engine takes "
            "gradient_clip_val). Rounds are limited by max_epochs, clients by FederatedLoop(cohort=...)"
        )


def check_strategy(trainer: Any) -> None:
    """Refuse several processes, and strategies for them, under which Lightning puts a sampler of its own in place.

    Raises:
        ConfigurationError: Names the number of processes or the strategy, and what to give.
    """
    processes = max(trainer.world_size, trainer.num_nodes * trainer.num_devices)  # the first is 1 before they start
    if processes > 1:
        raise ConfigurationError(f"a federation runs in one process; the Trainer has {processes}. Use devices=1")
    if "ParallelStrategy" in lightning_kinds(trainer.strategy):
        raise ConfigurationError(
            f"a federation runs in one process; {type(trainer.strategy).__name__} is for several, and would split "
            "and shuffle the clients of a round. Leave the Trainer's strategy out"
        )


def end_by_rounds(callbacks: Iterable[Any]) -> None:
    """Let timers (``max_time``) look at the clock after each round, not after each client, whose round would be lost.

    The time is that of the whole run: it goes on where the run is resumed.
    """
    for callback in callbacks:
        # One without a duration measures and stops nothing.
        if "Timer" in lightning_kinds(callback) and callback.time_remaining() is not None:
            end_after_epochs(callback)


def lightning_kinds(found: Any) -> set[str]:
    """Names of the classes of Lightning, under either name of the package, that a callback or a strategy is of."""
    classes = type(found).__mro__
    return {kind.__name__ for kind in classes if kind.__module__.startswith(("lightning.", "pytorch_lightning."))}
