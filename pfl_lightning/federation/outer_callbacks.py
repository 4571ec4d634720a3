"""Callbacks and options of Lightning that have nothing to act on in the outer Trainer, which trains no model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L

from pfl_lightning.errors import ConfigurationError

__all__ = [
    "check_callbacks",
    "check_gradient_options",
    "check_round_options",
    "check_strategy",
    "end_by_rounds",
    "lightning_kinds",
    "validates_within_rounds",
]

_SEARCH = (
    "{name} needs a plain training run, and a federation's Trainer has none: run it with your module and a plain "
    "Trainer first, and give the federation what it found"
)
_LOCAL = (
    "{name} acts on a model while it is trained, and the models are trained in the clients' local fits: remove it "
    "here and give it to the engine, engine=TrainerEngine(callbacks=[{name}(...)]); it starts again in each local fit"
)
_REFUSED = {
    "BatchSizeFinder": _SEARCH,
    "LearningRateFinder": _SEARCH,
    "GradientAccumulationScheduler": _LOCAL,
    "StochasticWeightAveraging": _LOCAL,
    "WeightAveraging": _LOCAL,
    "ModelPruning": _LOCAL,
    "BaseFinetuning": _LOCAL,
}


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks of the outer Trainer that could only fail or do nothing, and warn of one that logs nothing.

    Raises:
        ConfigurationError: Names the callback and what to do in its place.
    """
    for callback in callbacks:
        kinds = lightning_kinds(callback)
        for kind in kinds & _REFUSED.keys():
            raise ConfigurationError(_REFUSED[kind].format(name=type(callback).__name__))
        if "LearningRateMonitor" in kinds:
            warnings.warn(
                f"{type(callback).__name__} logs nothing: optimizers live in the clients' local fits. A module "
                "given to federate may log its rate in training_step: self.log('lr', "
                "self.optimizers().param_groups[0]['lr'])",
                stacklevel=2,
            )


def check_gradient_options(trainer: L.Trainer) -> None:
    """Refuse what the outer Trainer would do with gradients, of which it has none: the engine does it in local fits.

    Raises:
        ConfigurationError: Names the options and the engine that takes them.
    """
    given: dict[str, Any] = {}
    if trainer.gradient_clip_val:
        given["gradient_clip_val"] = trainer.gradient_clip_val
        if trainer.gradient_clip_algorithm is not None:
            given["gradient_clip_algorithm"] = trainer.gradient_clip_algorithm.value
    engine = "SequentialEngine"
    if trainer.accumulate_grad_batches != 1:
        given["accumulate_grad_batches"], engine = trainer.accumulate_grad_batches, "TrainerEngine"
    if given:
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigurationError(
            f"Trainer({options}) is about the gradients of local fits, and the outer Trainer has none: leave it out "
            f"there and give it to the engine, Federation(..., engine={engine}({options}))"
        )


def check_round_options(trainer: Any) -> None:
    """Refuse options that count steps, which the outer Trainer does not take, train some clients, or validate too soon.

    Raises:
        ConfigurationError: Names the option and what to do in its place.
    """
    batches, most = trainer.overfit_batches, trainer.max_steps
    if batches:
        raise ConfigurationError(
            f"Trainer(overfit_batches={batches}) would train {batches} of the clients, since a batch of the outer "
            "Trainer is a client: leave it out there; FederatedLoop(cohort=...) says how many clients a round trains, "
            f"and Federation(..., engine=TrainerEngine(limit_train_batches={batches})) takes so many batches of each "
            "client"
        )
    if trainer.min_steps is not None or (most != -1 and not trainer.fast_dev_run):  # which sets max_steps
        given = f"max_steps={most}" if most != -1 else f"min_steps={trainer.min_steps}"
        raise ConfigurationError(
            f"Trainer({given}) counts optimizer steps, and the outer Trainer takes none, so that it would have no "
            "effect: rounds are max_epochs and min_epochs; Federation(..., engine=TrainerEngine(max_steps=...)) limits "
            "the steps of each phase of a local fit"
        )
    if trainer.check_val_every_n_epoch == 0:
        raise ConfigurationError(
            "Trainer(check_val_every_n_epoch=0) would validate after every 0 rounds: give at least 1, or "
            "limit_val_batches=0 for no validation"
        )
    within = validates_within_rounds(trainer)
    if within is not None:
        raise ConfigurationError(within)


def validates_within_rounds(trainer: Any) -> str | None:
    """What is wrong with a ``val_check_interval``: the server has not aggregated what would be evaluated."""
    interval = getattr(trainer, "val_check_interval", 1.0)
    seconds = getattr(trainer, "_val_check_time_interval", None)
    usual = seconds is None and (interval == 0 or (isinstance(interval, float) and interval == 1.0))
    if usual or trainer.limit_val_batches == 0:
        return None
    given = interval if seconds is None else f"{seconds} s"
    return (
        f"Trainer(val_check_interval={given}) would validate in the middle of a round, of which it counts "
        "the clients, before the server has aggregated: use check_val_every_n_epoch, which counts rounds"
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
        if (
            "Timer" in lightning_kinds(callback)
            and callback.time_remaining() is not None
            and callback._interval == "step"
        ):
            callback._interval = "epoch"


def lightning_kinds(found: Any) -> set[str]:
    """Names of the classes of Lightning, under either name of the package, that a callback or a strategy is of."""
    classes = type(found).__mro__
    return {kind.__name__ for kind in classes if kind.__module__.startswith(("lightning.", "pytorch_lightning."))}
