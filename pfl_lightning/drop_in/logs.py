"""What a module logs while no Trainer is there to take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from pfl_lightning.errors import ConfigurationError

__all__ = ["LogRecord", "can_reduce"]

_REDUCTIONS = ("mean", "sum", "min", "max")


def can_reduce(reduce_fx: Any) -> bool:
    """Whether a record takes values with this ``reduce_fx``."""
    return reduce_fx in (*_REDUCTIONS, torch.mean, torch.sum, torch.min, torch.max)


@dataclass
class _Entry:
    """Values of one name in one epoch; a mean is weighted by batch sizes."""

    epoch: int
    reduction: str = "mean"
    values: list[Tensor] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    metric: Metric | None = None

    def result(self) -> float:
        if self.metric is not None:
            return float(self.metric.compute())
        values = torch.stack([value.double().cpu() for value in self.values])
        if self.reduction == "mean":
            weights = torch.tensor(self.weights, dtype=torch.float64)
            return float((values * weights).sum() / weights.sum())
        return float(getattr(torch, self.reduction)(values))


class LogRecord:
    """Takes what ``self.log`` is given, in the place of a Trainer, and reduces it as a Trainer does over an epoch.

    Values are means over the steps of the newest epoch, weighted by batch sizes; ``reduce_fx`` may be ``"mean"``,
    ``"sum"``, ``"min"`` or ``"max"``. A logged metric object is computed at the end of the epoch and reset.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._epoch = 0
        self._batch_size: int | None = None
        self._batch: Any = None
        self._suffix = ""

    def start_epoch(self) -> None:
        """From now on values belong to a new epoch."""
        for entry in self._entries.values():
            if entry.metric is not None and entry.epoch == self._epoch:
                entry.values, entry.weights = [torch.as_tensor(entry.result())], [1]
                entry.metric.reset()
                entry.metric = None
        self._epoch += 1

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """From now on values weigh as much as this batch has samples, and are of this one of several loaders."""
        self._batch, self._batch_size = batch, None
        self._suffix = "" if dataloader_idx is None else f"/dataloader_idx_{dataloader_idx}"

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *args: Any,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        **kwargs: Any,
    ) -> None:
        """Take a value, as ``LightningModule.log`` does."""
        name += self._suffix if add_dataloader_idx else ""
        reduction = getattr(reduce_fx, "__name__", reduce_fx)
        if not can_reduce(reduce_fx):
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): SequentialEngine takes {', '.join(_REDUCTIONS)}; use "
                f"TrainerEngine"
            )
        entry = self._entries.get(name)
        if entry is None or entry.epoch != self._epoch:
            entry = self._entries[name] = _Entry(self._epoch, reduction)
        if isinstance(value, Metric):
            entry.metric = value
            return
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            raise ConfigurationError(
                f"self.log({name!r}, ...) takes single numbers, got a tensor of shape {tuple(tensor.shape)}"
            )
        entry.values.append(tensor.reshape(()))
        entry.weights.append(batch_size or self._size_of_batch())

    def values(self) -> dict[str, float]:
        """What was logged, reduced; metrics are computed and reset."""
        found = {name: entry.result() for name, entry in self._entries.items()}
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()
        return found

    def _size_of_batch(self) -> int:
        if self._batch_size is None:
            self._batch_size = 1 if self._batch is None else _number_of_samples(self._batch)
        return self._batch_size


def _number_of_samples(batch: Any) -> int:
    try:
        return int(extract_batch_size(batch))
    except (RuntimeError, MisconfigurationException):  # an object that shows no tensors: all batches weigh the same
        return 1
