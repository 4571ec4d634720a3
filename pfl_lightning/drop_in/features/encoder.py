"""A user's LightningModule as far as its features, and copies of it that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.drop_in.client.copies import Factory, copied
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.transient import Transient
from pfl_lightning.drop_in.features.capture import FeatureCapture
from pfl_lightning.drop_in.features.passes import FeaturePass
from pfl_lightning.fit.data import FitData
from pfl_lightning.self_supervised.target import parameters_to_buffers

BATCH = "batch of the module"
"""Name under which a view is a whole batch, which objectives join as they join dictionaries."""


class ModuleEncoder(nn.Module):
    """A user's module as far as its features.

    Args:
        module: The module, which is not copied.
        capture: Sees its features.
        factory: Makes it once more; ``None`` where ``copy.deepcopy`` does.
        evaluating: Names of its layers that its author has put into evaluation mode.
        step: Its training step, for batches without inputs that ``forward`` takes; ``None`` for the module's.
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

    def forward(self, inputs: Any) -> Tensor:
        """Features (N, d) of what ``forward`` of the module takes, or of what :meth:`view` gives."""
        own = FeaturePass(self.module, self._capture, None, None, self._step)
        if isinstance(inputs, Mapping) and BATCH in inputs:
            return own.features(inputs[BATCH])
        return own.features_of_inputs(inputs)

    def view(self, batch: Any) -> Any:
        """What of a batch is needed for its features: inputs, or else the batch under a name that says so."""
        if not isinstance(batch, tuple | list) or not batch or not is_overridden("forward", self.module):
            return {BATCH: batch}
        return batch[0] if isinstance(batch[0], Tensor) else {BATCH: (batch[0],)}

    def features_of(self, data: FitData) -> Tensor:
        """Features (n, d) of all of a client's training items, in evaluation mode and without gradient."""
        return FeaturePass(self.module, self._capture, None, data.datamodule, self._step).features_alone(data)

    def forget(self) -> None:
        """Give a copy of the module the attributes back that it was made with."""
        if self._given is not None:
            self._given.restore(self.module)

    def lend_trainer(self, trainer: Any) -> None:
        """Let the training step of a copy of the module ask for the Trainer of the module."""
        self.module.trainer = trainer

    def train(self, mode: bool = True) -> ModuleEncoder:
        """Set the mode of all layers but those that the module's author has put into evaluation mode."""
        super().train(mode)
        for name in self._evaluating if mode else ():
            self.module.get_submodule(name).eval()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleEncoder:
        """The same of a copy of the module, also of one whose parameters are buffers."""
        self.forget()
        module = self._module_once_more()
        other = ModuleEncoder(module, self._capture.on(module), self._factory, self._evaluating)
        other._given = Transient(module)
        other.training = self.training
        memo[id(self)] = other
        return other

    def _module_once_more(self) -> L.LightningModule:
        if self._factory is None or next(self.module.parameters(), None) is not None:
            return copied(self.module, self._factory)
        with isolate_rng():
            other = self._factory()
        parameters_to_buffers(other, persistent=bool(plain_state(self.module)))
        with torch.no_grad():
            for (_, value), (_, own) in zip(other.named_buffers(), self.module.named_buffers(), strict=True):
                value.data = own.detach().clone()
        for layer, own_layer in zip(other.modules(), self.module.modules(), strict=True):
            layer.training = own_layer.training
        return other
