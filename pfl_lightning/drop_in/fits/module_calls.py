"""A user's module as a Trainer treats it: its calls, functions in the place of its methods, and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.errors import ConfigurationError

__all__ = ["at_learning_rate", "call_step", "flat_objects", "held_schedulers", "patched", "share_of_learning_rates"]


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


def call_step(step: Callable[..., Any], batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
    """Call a ``*_step``, of which the number of the batch may be left out; of several loaders, with theirs."""
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise ConfigurationError("a step that takes dataloader_iter needs TrainerEngine")
    if dataloader_idx is not None:
        return step(batch, batch_idx, dataloader_idx)
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return step(batch, batch_idx)
    return step(batch)


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
                    f"a phase of this method has {wanted}, and {type(found).__name__} sets rates of its own: leave out "
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
    found = list(flat_objects(configured))
    own = [value for value in vars(module).values() if isinstance(value, LRScheduler)]
    return [each for each in own if not _among(each, found) and _among(each.optimizer, found)]


def _among(one: Any, others: list[Any]) -> bool:
    return any(one is other for other in others)
