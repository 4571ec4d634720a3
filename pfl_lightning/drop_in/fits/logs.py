"""What a module logs while no Trainer is there to take it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from pfl_lightning.datamodules.adapters.workers import size_of
from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.errors import ConfigurationError

_REDUCTIONS = ("mean", "sum", "min", "max")

_NAMES: dict[Any, str] = {
    **{name: name for name in _REDUCTIONS},
    **{getattr(torch, name): name for name in _REDUCTIONS},
    **{sum: "sum", min: "min", max: "max", "avg": "mean"},
}
"""Names of what Lightning takes as ``reduce_fx``."""


def reduction_name(reduce_fx: Any) -> str | None:
    """``"mean"``, ``"sum"``, ``"min"`` or ``"max"``; ``None`` for what a Trainer does not take either."""
    return _NAMES.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)


class Notes:
    """What calls of ``self.log`` say beside the values."""

    def __init__(self) -> None:
        self.progress_bar_names: set[str] = set()
        """Names of what the progress bar shows."""
        self.reductions: dict[str, str] = {}
        """``"sum"``, ``"min"`` or ``"max"`` by the name of what is reduced so, over steps and over clients."""

    def note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note one call, with its arguments."""
        if args[0] if args else kwargs.get("prog_bar"):
            self.progress_bar_names.add(name)
        kinds = ((SumMetric, "sum"), (MaxMetric, "max"), (MinMetric, "min"))
        if isinstance(value, Metric):
            found = next((how for kind, how in kinds if isinstance(value, kind)), "mean")
        else:
            found = reduction_name(args[4] if len(args) > 4 else kwargs.get("reduce_fx", "mean")) or "mean"
        if found != "mean":
            self.reductions[name] = found


class LogNotes(Notes):
    """What is known of logged values beside their numbers.

    Attributes:
        best: ``"max"`` or ``"min"`` by the name of what a MaxMetric or MinMetric of the module gave: these keep the
            best of all epochs, and are reset before each client.
        loader: Number of the loader of the current batch; ``None`` between batches, and where there is one loader.
        loaders: Numbers of the loaders in whose batches a value was logged, by its name; ``None`` for a hook between
            batches.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kinds = ((MaxMetric, "max"), (MinMetric, "min"))
        self._keeping = [(each, how) for each in module.modules() for kind, how in kinds if isinstance(each, kind)]
        self.best: dict[str, str] = {}
        self.loader: int | None = None
        self.loaders: dict[str, set[int | None]] = {}

    @property
    def of_loaders(self) -> dict[str, frozenset[int]]:
        """The loaders of those values that were logged in batches alone."""
        return {name: frozenset(own) for name, own in self.loaders.items() if None not in own}  # type: ignore[arg-type]

    def watched(self, log: Callable[..., Any]) -> Callable[..., None]:
        """A function in the place of ``self.log`` that notes and then calls it."""

        @wraps(log)
        def seen(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self.note(name, value, *args, **kwargs)
            self.loaders.setdefault(name, set()).add(self.loader)
            for metric, how in self._keeping:
                if value is metric._computed and value is not None:
                    self.best[name] = how
            log(name, value, *args, **kwargs)

        return seen


@dataclass
class _Entry:
    """Values of one name in one epoch; a mean is weighted by batch sizes."""

    epoch: int
    reduction: str = "mean"
    values: list[Tensor] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    metric: Metric | None = None
    forked: bool = False

    def result(self) -> float:
        if self.metric is not None:
            return float(self.metric.compute())
        values = torch.stack([value.cpu().double() for value in self.values])
        if self.reduction == "mean":
            weights = torch.tensor(self.weights, dtype=torch.float64)
            return float((values * weights).sum() / weights.sum())
        return float(getattr(torch, self.reduction)(values))


class LogRecord(Notes):
    """Takes what ``self.log`` is given, in the place of a Trainer, and reduces it as a Trainer does over an epoch.

    Values are means over the steps of the newest epoch, weighted by batch sizes; ``reduce_fx`` may be ``"mean"``,
    ``"sum"``, ``"min"`` or ``"max"``. A logged metric object is computed at the end of the epoch and reset.
    """

    def __init__(self, in_training: bool = False) -> None:
        super().__init__()
        self._in_training = in_training
        self.names: set[str] = set()
        """All that was logged, also what is not taken."""
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
        self.note(name, value, prog_bar=prog_bar, reduce_fx=reduce_fx)
        by_step = self._in_training if on_step is None else on_step
        by_epoch = not self._in_training if on_epoch is None else on_epoch
        reduction = reduction_name(reduce_fx)
        if reduction is None:
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): SequentialEngine takes {', '.join(_REDUCTIONS)}. "
                "Log a torchmetrics.Metric for another reduction"
            )
        entry = self._entries.get(name)
        if entry is None or entry.epoch != self._epoch:
            entry = self._entries[name] = _Entry(self._epoch, reduction)
        entry.forked = by_step and by_epoch
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
        for name, entry in self._entries.items():
            if entry.forked and entry.metric is None:  # by Lightning's names
                found |= {f"{name}_epoch": found[name], f"{name}_step": float(entry.values[-1])}
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()
        return found

    def _size_of_batch(self) -> int:
        if self._batch_size is None:
            # 1 for none, and for an object that shows no tensors: all batches weigh the same
            self._batch_size = 1 if self._batch is None else size_of(self._batch)
        return self._batch_size


MEANINGLESS = re.compile(r"No (positive|negative) samples|.*(should be meaningless|is undefined)")
"""How torchmetrics warns that it returns a number, mostly zero, in the place of a value that does not exist."""

TOO_FEW = re.compile(r"Needs at least two samples")
"""How torchmetrics refuses to compute a value of a single sample."""


@contextmanager
def undefined_as_nan(module: nn.Module) -> Iterator[None]:
    """Let the metrics of a module give NaN inside where torchmetrics says that the value is undefined.

    It says so by a warning, such as that of an AUROC without negative samples, which is shown in any case. Values of
    single batches, which ``forward`` returns, stay as they are.
    """
    with ExitStack() as stack:
        for each in module.modules():
            if isinstance(each, Metric):
                compute = vars(each)["compute"]
                stack.enter_context(patched(each, compute=wraps(compute)(partial(_defined, each, compute))))
        yield


def _defined(metric: Metric, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # whatever the filters are: a value must not depend on them
            value = compute(*args, **kwargs)
    except ValueError as error:
        if not TOO_FEW.match(str(error)):
            raise
        return torch.tensor(torch.nan, device=metric.device)
    for each in said:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    of_batch = metric.sync_on_compute and not metric._to_sync  # as `forward` asks for it
    if of_batch or not isinstance(value, Tensor) or not any(MEANINGLESS.match(str(each.message)) for each in said):
        return value
    value = torch.full_like(value, torch.nan, dtype=value.dtype if value.is_floating_point() else torch.float32)
    if metric._computed is not None:
        metric._computed = value
    return value
