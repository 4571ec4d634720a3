"""A Trainer's results that move a logged value's record to the value's device only if it is on another."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor

__all__ = ["keep_results_in_place"]


def keep_results_in_place(trainer: Any) -> None:
    """Skip Lightning's walk through all that belongs to a record at every call of ``self.log``.

    The walk moves nothing and takes as long as a step of a small model. What is logged is the same.
    """
    steps = trainer.fit_loop.epoch_loop
    for loop in (steps, steps.val_loop, trainer.validate_loop, trainer.test_loop):
        if type(loop._results) is _ResultCollection:  # not of pytorch_lightning, and not replaced already
            loop._results = _Results(loop._results.training)


class _Record(_ResultMetric):
    """The record of one logged value."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self, "value", None)
        there = isinstance(value, Tensor) and args == (value.device,)
        return self if there else super().to(*args, **kwargs)


class _Results(_ResultCollection):
    """The records by name."""

    def __setitem__(self, name: str, record: _ResultMetric) -> None:
        super().__setitem__(name, _Record(record.meta, record.is_tensor))
