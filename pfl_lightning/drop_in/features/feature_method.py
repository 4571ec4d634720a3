"""What stands before a method on features among the bases of a client that trains a user's LightningModule."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from pfl_lightning.drop_in.client.module_client import ModuleClient
from pfl_lightning.drop_in.client.module_options import TRAINING, refuse_options
from pfl_lightning.errors import ConfigurationError

__all__ = ["FeatureMethod"]

MODULES_OWN = {"head_lr": None, "head_relu": False}
"""Options of methods that are left to the module: its head's rate unless one is given, and its layers as they are."""


class FeatureMethod(ModuleClient):
    """Stands before the method among a client's bases: steps and forward passes are the module's, whatever it says."""

    _entered: Tensor | None = None

    def __init__(self, encoder: nn.Module, num_classes: int, **options: Any) -> None:
        refuse_options(type(self), options, only=TRAINING)
        if options.get("head_relu"):
            raise ConfigurationError(
                "head_relu: the layers of a user's LightningModule stay as they are; features= names the layer whose "
                "output are the features, such as the one before a ReLU"
            )
        known = inspect.signature(type(self).method.__init__).parameters
        own = {name: value for name, value in MODULES_OWN.items() if name in known}
        super().__init__(encoder, num_classes, **{**own, **options})
        self._find_unset_copies()

    def _find_unset_copies(self) -> None:
        """Networks that the method has made of the module have its buffers that are not finite, too."""
        endings = tuple(f".{name}" for name in self.uninitialized_buffers)
        copies = [name for name, buffer in self.named_buffers(remove_duplicate=False) if _not_finite(buffer)]
        self.uninitialized_buffers |= {name for name in copies if endings and name.endswith(endings)}

    def head_input(self, features: Tensor) -> Tensor:
        """What enters the head; in and after a step of the module what has entered it, which is computed once."""
        return super().head_input(features) if self._entered is None else self._entered

    forward = ModuleClient.forward
    training_step = ModuleClient.training_step  # type: ignore[assignment]
    steps_on_features = ModuleClient.steps_on_features


def _not_finite(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and not bool(buffer.isfinite().all())
