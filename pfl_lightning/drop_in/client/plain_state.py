"""The ``state_dict`` of a module whose author overrides it, to leave frozen weights out of checkpoints, say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.messages import State
from pfl_lightning.state.tensors import load_state

EXTRA_STATE = "_extra_state"
"""How names of what layers add by ``get_extra_state`` end: no parameters and no buffers."""


@contextmanager
def plain_states(module: nn.Module, *, without: nn.Module | None = None) -> Iterator[None]:
    """Let ``state_dict`` give all parameters and persistent buffers under their own names, as torch has it.

    Args:
        module: The module, with all its layers.
        without: One that stays as it is.
    """
    with ExitStack() as stack:
        for layer in module.modules():
            if layer is not without and _overrides(layer):
                stack.enter_context(patched(layer, state_dict=partial(nn.Module.state_dict, layer)))
        yield


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, whatever the author lets ``state_dict`` give."""
    with plain_states(module):
        return {name: value for name, value in module.state_dict().items() if not name.endswith(EXTRA_STATE)}


def load_plain_state(module: nn.Module, state: State) -> None:
    """Load tensors as ``load_state`` does, also those that the author's ``state_dict`` leaves out."""
    with plain_states(module):
        load_state(module, state)


def _overrides(layer: Any) -> bool:
    """Whether a layer has a ``state_dict`` of its own; a metric's gives the states that are kept."""
    kind = type(layer)
    own = kind.state_dict is not nn.Module.state_dict and not kind.state_dict.__module__.startswith("torch.")
    return (own or "state_dict" in vars(layer)) and not isinstance(layer, Metric)
