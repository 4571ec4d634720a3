"""A user's LightningModule as far as its features: passes over batches and items, and copies that follow it."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import Metric

from pfl_lightning.drop_in.client.copies import Factory, copied
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.transient import Transient
from pfl_lightning.drop_in.features.capture import FeatureCapture, classes_of_batch
from pfl_lightning.drop_in.fits.module_calls import call_step, nothing, patched
from pfl_lightning.engines.sequential import BATCH_HOOKS
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.lightning_private import attached, silent_trainer
from pfl_lightning.self_supervised.target import parameters_to_buffers

BATCH = "batch of the module"
"""Name under which a view is a whole batch, which objectives join as they join dictionaries."""


class ModuleEncoder(nn.Module):
    """A user's module as far as its features.

    The module's ``forward`` is called with the first entry of a batch. Where a batch is no tuple (a dictionary, a
    graph), or there is no ``forward`` that computes them of it alone, its training step is, whose loss and log are
    dropped.

    Args:
        module: The module, which is not copied.
        capture: Sees its features.
        factory: Makes it once more; ``None`` where ``copy.deepcopy`` does.
        evaluating: Names of its layers that its author has put into evaluation mode.
        step: Its training step; ``None`` for the module's.
    """

    def __init__(
        self,
        module: L.LightningModule,
        capture: FeatureCapture,
        factory: Factory | None = None,
        evaluating: Iterable[str] = (),
        step: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.out_features = module, capture.source.width
        self._capture, self._factory, self._evaluating, self._step = capture, factory, tuple(evaluating), step
        self._given: Transient | None = None  # of a copy

    # ------------------------------------------------------------------ batches

    def forward(self, inputs: Any) -> Tensor:
        """Features (N, d) of what ``forward`` of the module takes, or of what :meth:`view` gives."""
        if isinstance(inputs, Mapping) and BATCH in inputs:
            return self.of_batch(inputs[BATCH])
        with self._capture.watching():
            self.module(inputs)
            return self._capture.take()

    def view(self, batch: Any) -> Any:
        """What of a batch is needed for its features: inputs, or else the batch under a name that says so."""
        if not self._takes_first_of(batch):
            return {BATCH: batch}
        return batch[0] if isinstance(batch[0], Tensor) else {BATCH: (batch[0],)}

    def _takes_first_of(self, batch: Any) -> bool:
        """Whether ``forward`` is the module's own, and can be called with the first entry of a batch alone."""
        if not isinstance(batch, tuple | list) or not batch or not is_overridden("forward", self.module):
            return False
        try:
            inspect.signature(self.module.forward).bind(batch[0])
        except TypeError:
            return False
        return True

    def of_batch(self, batch: Any) -> Tensor:
        """Features (N, d) of a batch.

        Raises:
            ConfigurationError: Neither ``forward`` nor the training step gives them.
        """
        if self._takes_first_of(batch):
            with self._capture.watching():
                self.module(batch[0])
                if self._capture.found is not None:  # else the step alone calls the head, with classes
                    return self._compared(batch, self._capture.take())
        return self._of_step(batch)

    def _of_step(self, batch: Any) -> Tensor:
        """Features (N, d) that the training step computes."""
        step = self._step or self.module.training_step
        try:
            with self._capture.watching(), patched(self.module, log=nothing, log_dict=nothing):
                call_step(step, batch, 0)
                return self._capture.take()
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                "the features of all of a client's samples are computed by forward, or by the training step of "
                f"{type(self.module).__name__} outside a fit, which failed with {type(error).__name__}: {error}. Use "
                "batches (inputs, ...), and a forward that takes the inputs"
            ) from error

    def _compared(self, batch: Any, found: Tensor) -> Tensor:
        """What ``forward`` has given, after a warning if the training step, of a copy, has other features of it."""
        if self._capture.compared or self._step is not None:
            return found
        self._capture.compared, own = True, found
        with suppress(Exception), isolate_rng():  # a step may need its Trainer, and a module hold what is not copied
            other = copy.deepcopy(self)
            own = other._of_step(batch)
            own = own if other._capture.calls == 1 else found  # several calls are told in a fit
        if own.shape != found.shape or (own - found).norm() > 0.01 * found.norm():
            warnings.warn(
                f"statistics use features of {type(self.module).__name__}.forward(batch[0]), but its training_step has "
                "different ones for the same batch: it uses further entries (a mask), or changes inputs. Use batches "
                "(inputs, classes), and change inputs in forward or on_after_batch_transfer (also at random)",
                stacklevel=2,
            )
        return found

    # ------------------------------------------------------------------ all training items of a client

    def features_of(self, data: FitData) -> Tensor:
        """Features (n, d) of all of a client's training items, in evaluation mode and without gradient."""
        with self._in_evaluation(data):
            return torch.cat([self.of_batch(batch) for batch in self._batches(data)])

    def features_and_classes(self, data: FitData, labels: Callable[[Any], Any] | None) -> tuple[Tensor, Tensor]:
        """The same, and classes (n,), which ``labels`` gives for a batch where it does not tell them."""
        with self._in_evaluation(data):
            found = [(self.of_batch(batch), classes_of_batch(batch, labels)) for batch in self._batches(data)]
        return torch.cat([features for features, _ in found]), torch.cat([classes for _, classes in found])

    def classes_of(self, data: FitData, labels: Callable[[Any], Any] | None) -> Tensor:
        """Classes (n,) alone."""
        return torch.cat([classes_of_batch(batch, labels).cpu() for batch in self._batches(data)])

    @contextmanager
    def _in_evaluation(self, data: FitData) -> Iterator[None]:
        try:
            with evaluating(self.module), torch.no_grad(), data.forward_context():
                yield
        finally:
            for layer in self.module.modules():
                if isinstance(layer, Metric):
                    layer.reset()

    def _batches(self, data: FitData) -> Iterator[Any]:
        """The batches in the items' order, through the hooks that a Trainer calls while it validates."""
        hooks = _batch_hooks(self.module, data.datamodule)
        # On a CPU, chunks that stay in its caches are faster than few large ones.
        size = min(data.eval_batch_size, 128) if data.device.type == "cpu" else data.eval_batch_size
        loader = data.part.loader(size, device=torch.device("cpu") if hooks else data.device)
        with _as_validating(self.module) if hooks else nullcontext():
            batch: Any
            for batch in loader.batches() if hasattr(loader, "batches") else loader:
                batch = data.convert_input(batch)
                if hooks:
                    before, transfer, after = hooks
                    batch = after(transfer(before(batch, 0), data.device, 0), 0)
                yield batch

    # ------------------------------------------------------------------ copies

    def forget(self) -> None:
        """Give a copy of the module the attributes back that it was made with."""
        if self._given is not None:
            self._given.restore(self.module)

    def train(self, mode: bool = True) -> ModuleEncoder:
        """Set the mode of all layers but those that the module's author has put into evaluation mode."""
        super().train(mode)
        for name in self._evaluating if mode else ():
            self.module.get_submodule(name).eval()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleEncoder:
        """The same of a copy of the module, also of one whose parameters are buffers."""
        self.forget()
        module = copied(self.module, None if self._factory is None else self._made_again)
        other = ModuleEncoder(module, self._capture.on(module), self._factory, self._evaluating)
        other._given = Transient(module)
        other.training = self.training
        memo[id(self)] = other
        return other

    def _made_again(self) -> L.LightningModule:
        assert self._factory is not None
        other = self._factory()
        if next(self.module.parameters(), None) is None:
            parameters_to_buffers(other, persistent=bool(plain_state(self.module)))
        return other


def _batch_hooks(module: L.LightningModule, datamodule: L.LightningDataModule | None) -> list[Any]:
    """Hooks that batches pass on their way, of the data module or else of the module; none if all are Lightning's."""
    found = [(name, owner) for name in BATCH_HOOKS for owner in (datamodule, module) if owner is not None]
    own = {name: getattr(owner, name) for name, owner in reversed(found) if is_overridden(name, owner)}
    return [own.get(name, getattr(module, name)) for name in BATCH_HOOKS] if own else []


def _as_validating(module: L.LightningModule) -> AbstractContextManager[None]:
    """Lend the module a Trainer that says that it validates, for hooks that augment in the training alone."""
    trainer = silent_trainer(accelerator="cpu", default_root_dir=os.devnull)
    trainer.validating = True
    return attached(module, trainer)
