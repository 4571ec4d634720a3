"""Half precision under ``vmap``: what autocast computes in single precision stays so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pfl_lightning.functional.numerics import at_least_single

SINGLE = frozenset(
    {"softmax", "softmin", "log_softmax", "group_norm", "binary_cross_entropy_with_logits", "cdist", "l1_loss"}
)
"""Functions that ``vmap`` takes apart before autocast sees them, which then casts nothing."""


class SinglePrecision(TorchFunctionMode):
    """Inside, under autocast, these functions are computed in single precision, as without ``vmap``.

    Args:
        device_type: Type of the device, such as ``"cuda"``, whose autocast is meant.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in SINGLE or not torch.is_autocast_enabled(self._device_type):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, at_least_single, (args, kwargs))
        with torch.autocast(self._device_type, enabled=False):
            return func(*args, **kwargs)
