"""Calls of a user's module as a Trainer would make them, and functions in the place of its methods for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from pfl_lightning.errors import ConfigurationError

__all__ = ["call_step", "patched"]


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
