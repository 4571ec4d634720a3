"""Values that a client logs in its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from pfl_lightning.errors import ConfigurationError

__all__ = ["StepLogs"]


class StepLogs(L.LightningModule):
    """``log`` and ``log_dict`` of a client, under an inner Trainer and without one."""

    _recorder: dict[str, list[Tensor]] | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as in any LightningModule; a local fit without an inner Trainer averages the value over its steps."""
        if self._recorder is None:
            if not args and "on_step" not in kwargs and "on_epoch" not in kwargs:
                kwargs |= {"on_step": False, "on_epoch": True}  # a mean (of the last epoch), not the last step
            super().log(name, value, *args, **kwargs)
        elif isinstance(value, Metric):
            raise ConfigurationError(
                f"self.log({name!r}, a metric): SequentialEngine takes numbers; metrics need TrainerEngine"
            )
        else:
            self._recorder.setdefault(name, []).append(torch.as_tensor(value).detach().clone())

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values, as :meth:`log` does."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    @contextmanager
    def recorded_logs(self, record: dict[str, list[Tensor]] | None = None) -> Iterator[dict[str, list[Tensor]]]:
        """Collect what :meth:`log` is given inside the block, in ``record`` or in a new dictionary."""
        self._recorder = {} if record is None else record
        try:
            yield self._recorder
        finally:
            self._recorder = None
