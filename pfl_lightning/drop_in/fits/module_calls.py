"""A user's module as a Trainer treats it: its calls, functions in the place of its methods, and its optimizers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.errors import ConfigurationError

_PACKAGES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.", "pfl_lightning.")


@contextmanager
def patched(module: nn.Module, **functions: Any) -> Iterator[None]:
    """Put functions in the place of methods of one object, not of its class, and take them away again."""
    before = {name: vars(module)[name] for name in functions if name in vars(module)}
    vars(module).update(functions)
    try:
        yield
    finally:
        for name in functions:
            vars(module).pop(name, None)
        vars(module).update(before)


@contextmanager
def lent_to_trainer(module: L.LightningModule, **functions: Callable[..., Any]) -> Iterator[None]:
    """Lend a module to an inner Trainer.

    ``setup`` and its like were called when the federation was set up; called again, they might make the layers again.

    Args:
        module: The module.
        functions: What stands in the place of its methods.
    """
    done = dict.fromkeys(("setup", "teardown", "prepare_data", "configure_model"), nothing)
    try:
        with patched(module, **done, configure_callbacks=list, **functions):  # the outer Trainer has its callbacks
            yield
    finally:
        module.trainer = None


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in the place of what was done before."""


def call_step(step: Callable[..., Any], batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
    """Call a ``*_step``, of which the number of the batch may be left out; of several loaders, with theirs."""
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise ConfigurationError("a step that takes dataloader_iter needs TrainerEngine")
    if dataloader_idx is not None:
        return step(batch, batch_idx, dataloader_idx)
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return step(batch, batch_idx)
    return step(batch)


@contextmanager
def training(module: nn.Module, wanted: Mapping[str, bool]) -> Iterator[None]:
    """Inside, parameters that are named have this ``requires_grad``."""
    before = {p: p.requires_grad for name, p in module.named_parameters() if name in wanted}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wanted.get(name, parameter.requires_grad))
    try:
        yield
    finally:
        for parameter, value in before.items():
            parameter.requires_grad_(value)


def at_learning_rate(configured: Any, lr: float) -> Any:
    """Set the learning rate of all optimizers and the one that their schedulers start from.

    Args:
        configured: What ``configure_optimizers`` returned, which is changed.
        lr: The learning rate.

    Raises:
        ConfigurationError: A scheduler has a schedule of its own (one-cycle, cyclic).
    """
    return _with_rates(configured, lambda _: lr, f"the learning rate {lr}")


def share_of_learning_rates(configured: Any, share: float) -> Any:
    """Multiply the learning rates of all optimizers and those that their schedulers start from.

    Args:
        configured: What ``configure_optimizers`` returned, which is changed.
        share: The factor.

    Raises:
        ConfigurationError: A scheduler has a schedule of its own (one-cycle, cyclic).
    """
    return _with_rates(configured, lambda rate: rate * share, f"{share:.3g} of the learning rate")


def _with_rates(configured: Any, new: Callable[[float], float], wanted: str) -> Any:
    for found in flat_objects(configured):
        if isinstance(found, Optimizer):
            for group in found.param_groups:
                group.update({name: new(group[name]) for name in ("lr", "initial_lr") if name in group})
        elif hasattr(found, "base_lrs"):
            if any("max_lr" in group for group in found.optimizer.param_groups):
                raise ConfigurationError(
                    f"a phase of this method has {wanted}, and {type(found).__name__} sets its own rates: leave out "
                    "the method's learning rate, or use another scheduler"
                )
            found.base_lrs = [new(rate) for rate in found.base_lrs]
    return configured


def flat_objects(configured: Any) -> Iterator[Any]:
    """Optimizers, schedulers and settings in what ``configure_optimizers`` returned, in its order."""
    if isinstance(configured, dict):
        for value in configured.values():
            yield from flat_objects(value)
    elif isinstance(configured, tuple | list):
        for value in configured:
            yield from flat_objects(value)
    else:
        yield configured


def held_schedulers(module: nn.Module, configured: Any) -> list[LRScheduler]:
    """Schedulers that ``configure_optimizers`` has made and not returned: the module steps them itself.

    Args:
        module: The module, whose attributes they are.
        configured: What ``configure_optimizers`` returned.
    """
    found = {id(each) for each in flat_objects(configured)}
    own = [value for value in vars(module).values() if isinstance(value, LRScheduler)]
    return [each for each in own if id(each) not in found and id(each.optimizer) in found]


def warn_of_counters(module: L.LightningModule) -> None:
    """Warn if a module's code asks for its epoch or step: without a Trainer they are always 0."""
    found = sorted(names_in_code(module) & {"current_epoch", "global_step"})
    if found:
        warnings.warn(
            f"{type(module).__name__} asks for {' and '.join(found)}, which SequentialEngine does not count: "
            f"always 0. Use TrainerEngine if it matters",
            stacklevel=2,
        )


def names_in_code(owner: Any, without: tuple[str, ...] = ()) -> frozenset[str]:
    """Names of attributes and functions in what the author of a module's or a callback's class has written.

    Args:
        owner: The module or callback.
        without: What names of methods begin with that are left out.
    """
    return _names_in_class(type(owner), without)  # type: ignore[arg-type]  # a class can be hashed


@cache
def _names_in_class(kind: type, without: tuple[str, ...]) -> frozenset[str]:
    of_lightning, replaced = {*dir(L.LightningModule), *dir(L.Callback)}, set[str]()
    waiting: list[CodeType] = []
    for base in kind.__mro__:
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
    return frozenset(found)
