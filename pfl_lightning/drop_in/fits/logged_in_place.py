"""Lightning's record of a logged value is moved to the value's device only if it is on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector import result
from torch import Tensor

__all__ = ["logged_in_place"]

_TensorOrMetric: Any = getattr(result, "_ResultMetric", None)


@contextmanager
def logged_in_place() -> Iterator[None]:
    """Spare every call of ``self.log`` inside a walk through all that belongs to the record, which moves nothing.

    It takes as long as a step of a small model. What is logged is the same.
    """
    own = None if _TensorOrMetric is None else vars(_TensorOrMetric).get("to")
    if own is None or hasattr(own, "__wrapped__"):  # another version of Lightning, or entered already
        yield
        return

    @wraps(own)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self, "value", None)
        there = isinstance(value, Tensor) and args == (value.device,)
        return self if there else own(self, *args, **kwargs)

    _TensorOrMetric.to = to
    try:
        yield
    finally:
        _TensorOrMetric.to = own
