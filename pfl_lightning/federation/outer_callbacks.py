"""Callbacks and options of Lightning that mean something else, or nothing, in the outer Trainer.

Its batches are clients, its epochs are rounds, and it trains no model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.lightning_private import end_after_epochs, seconds_between_validations

__all__ = [
    "call_with_options",
    "check_callbacks",
    "check_options",
    "check_strategy",
    "end_by_rounds",
    "lightning_kinds",
    "refuse_callback",
]

Place = Literal["Federation", "federate", "inside"]
"""The outer Trainer of a method's own clients, that of a user's module, and local fits."""

_SEARCHES = {"BatchSizeFinder", "LearningRateFinder"}
_SEARCH = (
    "{name} needs a plain training run, and a federation's Trainer has none: run it with your module and a plain "
    "Trainer first, and give the federation what it found"
)
_LOCAL = (
    "{name} acts on a model while it is trained, and the models are trained in the clients' local fits: remove it "
    "here and give it to the engine, engine=TrainerEngine(callbacks=[{name}(...)]); it starts again in each local fit"
)
_BATCHES = (
    "{name} acts on batches, and a batch of the outer Trainer is a client: leave it out there and use "
    "{call}(..., local_callbacks=[{name}(...)]); it starts again in each local fit"
)
_INSIDE = (
    "{name} has nothing to do inside local fits, which are silent, train as they are told and save nothing: give it to "
    "the outer Trainer's callbacks, or leave it out"
)
_TRAINING = ("GradientAccumulationScheduler", "StochasticWeightAveraging", "WeightAveraging", "ModelPruning")
_REFUSED: dict[Place, dict[str, str]] = {
    "Federation": dict.fromkeys(_SEARCHES, _SEARCH) | dict.fromkeys((*_TRAINING, "BaseFinetuning"), _LOCAL),
    "federate": dict.fromkeys(("GradientAccumulationScheduler", "SpikeDetection", "ThroughputMonitor"), _BATCHES),
    "inside": dict.fromkeys((*_SEARCHES, "Checkpoint", "ProgressBar"), _INSIDE),
}
"""What is refused of Lightning's callbacks, by the place and the name of their class."""

_OPTIONS = {
    "fast_dev_run": (
        "would run {value:d} whole client(s), since a batch of the outer Trainer is a client: try a round by "
        "Trainer(max_epochs=1, logger=False, enable_checkpointing=False) and {call}(..., engine=TrainerEngine("
        "limit_train_batches={value:d}, limit_val_batches={value:d}, limit_test_batches={value:d}))"
    ),
    "overfit_batches": (
        "would train {value} of the clients, since a batch of the outer Trainer is a client: leave it out there; "
        "{call}(..., engine=TrainerEngine(limit_train_batches={value})) takes so many batches of each client, and "
        "FederatedLoop(cohort=...) says how many clients a round trains"
    ),
    "min_steps": (
        "counts optimizer steps, and the outer Trainer takes none: use min_epochs, the least number of rounds"
    ),
    "check_val_every_n_epoch": (
        "would validate after every 0 rounds: give at least 1, or limit_val_batches=0 for no validation"
    ),
    "reload_dataloaders_every_n_epochs": (
        "would ask for other loaders in later rounds, and clients go on with items of the first: leave it out, and let "
        "the Dataset itself follow self.trainer.current_epoch of the module, by an attribute"
    ),
    "val_check_interval": (
        "would validate in the middle of a round, of which it counts the clients, before the server has aggregated: "
        "use check_val_every_n_epoch, which counts rounds"
    ),
}
"""What is wrong with options of the outer Trainer, beside those that an engine takes."""

_FORMER_METRIC = re.compile(r"(novel_)?((?:accuracy|loss)/(?:mean|std|worst_decile|best|worst|lower|upper))")
"""Names that metrics of the validation parts had in earlier versions."""

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


def call_with_options(callbacks: Iterable[Any]) -> str:
    """What has the options of the federation in the user's code: ``federate``, or a FederatedLoop with a method."""
    return "FederatedLoop" if any(getattr(each, "makes_federations", False) for each in callbacks) else "federate"


def refuse_callback(callback: Any, place: Place, call: str = "federate") -> None:
    """Refuse a callback that could only fail or do nothing in a place.

    Raises:
        ConfigurationError: Names the callback and what to do in its place.
    """
    for kind in lightning_kinds(callback) & _REFUSED[place].keys():
        raise ConfigurationError(_REFUSED[place][kind].format(name=type(callback).__name__, call=call))


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks of the outer Trainer that could only fail or do nothing, and warn of one that logs nothing.

    Those that watch a metric by its former name are among them.

    Raises:
        ConfigurationError: See :func:`refuse_callback`.
    """
    for callback in callbacks:
        refuse_callback(callback, "Federation")
        former = _FORMER_METRIC.fullmatch(str(getattr(callback, "monitor", "")))
        if former:
            raise ConfigurationError(
                f"{type(callback).__name__} watches {former[0]!r}, which is called "
                f"'{former[1] or ''}val_{former[2]}' now: give it monitor={(former[1] or '') + 'val_' + former[2]!r}"
            )
        if "LearningRateMonitor" in lightning_kinds(callback):
            warnings.warn(
                f"{type(callback).__name__} logs nothing: optimizers live in the clients' local fits. A module "
                "given to federate may log its rate in training_step: self.log('lr', "
                "self.optimizers().param_groups[0]['lr'])",
                stacklevel=2,
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
    with_module = call != "Federation"
    for name, value in _shortcuts(trainer, with_module):  # which set others, that are not to be named in their place
        raise ConfigurationError(f"Trainer({name}={value}) {_OPTIONS[name].format(value=value, call=call)}")
    _check_options_of_fits(trainer, call)
    for name, value in _of_rounds(trainer, with_module):
        raise ConfigurationError(f"Trainer({name}={value}) {_OPTIONS[name]}")
    if with_module and type(trainer.profiler).__name__ != "PassThroughProfiler":
        warnings.warn(
            "Trainer(profiler=...) times rounds and local fits as a whole; what happens inside local fits is timed by "
            f"{call}(..., engine=TrainerEngine(profiler=...))",
            stacklevel=2,
        )


def _shortcuts(trainer: Any, with_module: bool) -> Iterator[tuple[str, Any]]:
    if with_module and trainer.fast_dev_run and trainer.max_steps != -1:  # the engine has not taken it over
        yield "fast_dev_run", trainer.fast_dev_run
    if trainer.overfit_batches:
        yield "overfit_batches", trainer.overfit_batches


def _check_options_of_fits(trainer: Any, call: str) -> None:
    """Refuse options about gradients, batches and steps, which the clients take."""
    clipping, accumulated, most = trainer.gradient_clip_val or None, trainer.accumulate_grad_batches, trainer.max_steps
    with_module = call != "Federation"
    algorithm = trainer.gradient_clip_algorithm if with_module or clipping else None
    given = {
        "gradient_clip_val": clipping,
        "gradient_clip_algorithm": getattr(algorithm, "value", None),
        "accumulate_grad_batches": None if accumulated == 1 else accumulated,
        "max_steps": None if most == -1 or trainer.fast_dev_run else most,  # which sets max_steps
        **{name: _limit(getattr(trainer, name)) for name in _LIMITS if with_module},
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return
    options = ", ".join(f"{name}={value!r}" for name, value in given.items())
    clips = given.keys() <= {"gradient_clip_val", "gradient_clip_algorithm"} and not with_module
    rounds = "; rounds are limited by max_epochs" if "max_steps" in given else ""
    clients = " (FederatedLoop(cohort=...) and (eval_cohort=...) say how many clients a round trains and evaluates)"
    raise ConfigurationError(
        f"Trainer({options}) is about the gradients, batches or steps of local fits, which the clients take: leave it "
        f"out there and give it to the engine, {call}(..., engine={'Sequential' if clips else 'Trainer'}Engine"
        f"({options})){rounds}{clients if given.keys() & {*_LIMITS} else ''}"
    )


def _limit(value: int | float) -> int | float | None:
    """A limit of batches that is one: all and none mean the same of clients."""
    return None if value == 0 or (isinstance(value, float) and value == 1.0) else value


def _of_rounds(trainer: Any, with_module: bool) -> Iterator[tuple[str, Any]]:
    if trainer.min_steps is not None:
        yield "min_steps", trainer.min_steps
    if trainer.check_val_every_n_epoch == 0:
        yield "check_val_every_n_epoch", 0
    if with_module and trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs
    interval, seconds = getattr(trainer, "val_check_interval", 1.0), seconds_between_validations(trainer)
    usual = seconds is None and (interval == 0 or (isinstance(interval, float) and interval == 1.0))
    if not usual and trainer.limit_val_batches != 0:
        yield "val_check_interval", interval if seconds is None else f"{seconds} s"


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
