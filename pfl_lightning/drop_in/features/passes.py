"""Passes over a client's items that give their features and classes, for the statistics that methods send."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from pfl_lightning.drop_in.features.capture import FeatureCapture, classes_of_batch
from pfl_lightning.drop_in.fits.module_calls import call_step, nothing, patched
from pfl_lightning.engines.sequential import BATCH_HOOKS
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.lightning_private import attached
from pfl_lightning.notices import silence


class FeaturePass:
    """Runs a user's module on batches for the sake of its features.

    The module's ``forward`` is called with the first entry of a batch. Where a batch is no tuple (a dictionary, a
    graph), or there is no ``forward`` that computes them, its training step is, whose loss and log are dropped.

    Args:
        module: The module.
        capture: Sees the features.
        labels: See :func:`~pfl_lightning.drop_in.features.capture.classes_of_batch`.
        datamodule: The project's data module, if its hooks apply to the batches.
        step: The training step; ``None`` for the module's.
    """

    def __init__(
        self,
        module: L.LightningModule,
        capture: FeatureCapture,
        labels: Callable[[Any], Any] | None,
        datamodule: L.LightningDataModule | None,
        step: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self._capture, self._labels, self._step = module, capture, labels, step
        self._hooks = _batch_hooks(module, datamodule)

    def features_of_inputs(self, inputs: Any) -> Tensor:
        """Features (N, d) of what ``forward`` takes."""
        with self._capture.watching():
            self._module(inputs)
            return self._capture.take()

    def features(self, batch: Any) -> Tensor:
        """Features (N, d) of a batch.

        Raises:
            ConfigurationError: Neither ``forward`` nor the training step gives them.
        """
        if isinstance(batch, tuple | list) and batch and is_overridden("forward", self._module):
            with self._capture.watching():
                self._module(batch[0])
                if self._capture.has_seen:  # else the head is called by the step alone, as one that needs the classes
                    return self._capture.take()
        step = self._step or self._module.training_step
        try:
            with self._capture.watching(), patched(self._module, log=nothing, log_dict=nothing):
                call_step(step, batch, 0)
                return self._capture.take()
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the features of all of a client's samples are computed by forward, or by the training step of "
                f"{type(self._module).__name__} outside a fit, which ended in {type(error).__name__}: {error}. Let "
                "batches "
                "be tuples (inputs, ...), and forward take the inputs"
            ) from error

    def all_features(self, data: FitData) -> tuple[Tensor, Tensor]:
        """Features (n, d) and classes (n,) of a client's training items, without gradient and in evaluation mode."""
        found: list[tuple[Tensor, Tensor]] = []
        with self._evaluating(data):
            for batch in self._batches(data):
                found.append((self.features(batch), classes_of_batch(batch, self._labels)))
        return torch.cat([features for features, _ in found]), torch.cat([classes for _, classes in found])

    def features_alone(self, data: FitData) -> Tensor:
        """The features of :meth:`all_features`, of items whose classes may not be known."""
        with self._evaluating(data):
            return torch.cat([self.features(batch) for batch in self._batches(data)])

    @contextmanager
    def _evaluating(self, data: FitData) -> Iterator[None]:
        modes = {layer: layer.training for layer in self._module.modules()}
        self._module.eval()
        try:
            with torch.no_grad(), data.forward_context():
                yield
        finally:
            for layer, mode in modes.items():
                layer.training = mode
                if isinstance(layer, Metric):
                    layer.reset()

    def all_classes(self, data: FitData) -> Tensor:
        """Classes (n,) of a client's training items."""
        return torch.cat([classes_of_batch(batch, self._labels).cpu() for batch in self._batches(data)])

    def _batches(self, data: FitData) -> Iterator[Any]:
        """The batches in the items' order, through the hooks that a Trainer calls while it validates."""
        # On a CPU, chunks that stay in its caches are faster than few large ones.
        size = min(data.eval_batch_size, 128) if data.device.type == "cpu" else data.eval_batch_size
        loader = data.part.loader(size, device=torch.device("cpu") if self._hooks else data.device)
        with _as_validating(self._module) if self._hooks else nullcontext():
            batch: Any
            for batch in loader.batches() if hasattr(loader, "batches") else loader:
                batch = data.convert_input(batch)
                yield self._transferred(batch, data.device) if self._hooks else batch

    def _transferred(self, batch: Any, device: torch.device) -> Any:
        before, transfer, after = (self._hooks.get(name) for name in BATCH_HOOKS)
        batch = batch if before is None else before(batch, 0)
        batch = (
            self._module.transfer_batch_to_device(batch, device, 0) if transfer is None else transfer(batch, device, 0)
        )
        return batch if after is None else after(batch, 0)


def _batch_hooks(module: L.LightningModule, datamodule: L.LightningDataModule | None) -> dict[str, Any]:
    """Hooks that change batches on their way: of the data module, or else of the module."""
    owners = [owner for owner in (datamodule, module) if owner is not None]
    return {
        name: getattr(next(owner for owner in owners if is_overridden(name, owner)), name)
        for name in BATCH_HOOKS
        if any(is_overridden(name, owner) for owner in owners)
    }


@contextmanager
def _as_validating(module: L.LightningModule) -> Iterator[None]:
    """Lend the module a Trainer that says that it validates, for hooks that augment in the training alone."""
    with silence():
        trainer = L.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=os.devnull,
        )
    trainer.validating = True
    with attached(module, trainer):
        yield
