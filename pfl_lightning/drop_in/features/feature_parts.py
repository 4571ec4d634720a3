"""What methods on features ask of a user's LightningModule: its head, its features, the classes of its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.client.features import FeatureAccess
from pfl_lightning.drop_in.client.head import head_layer, renew
from pfl_lightning.drop_in.client.module_client import ModuleClient
from pfl_lightning.drop_in.client.module_options import TRAINING
from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.drop_in.features.capture import FeatureCapture, FeatureSource, classes_of_batch
from pfl_lightning.drop_in.features.encoder import ModuleEncoder, Remaking
from pfl_lightning.drop_in.features.passes import FeaturePass
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData

__all__ = ["FeatureParts"]


class FeatureParts(ModuleClient):
    """Encoder, head, features and classes of a user's module.

    Args:
        encoder: The module, which is not copied.
        num_classes: Number of classes, C.
        head: The parameters of its head, which are those of one layer.
        source: Where features and classes are.
        options: See :class:`~pfl_lightning.drop_in.client.module_client.ModuleClient`; what a method says of optimizers
            is left to the module.
    """

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, head: Roles, source: FeatureSource, **options: Any
    ) -> None:
        own = {name: value for name, value in options.items() if name not in TRAINING}
        super().__init__(encoder, num_classes, head=head, **own)
        if not self.module.automatic_optimization:
            raise ConfigurationError(
                f"{type(self).__name__} computes the loss that is stepped on from the module's features, and "
                f"{type(encoder).__name__} steps its optimizers by itself (manual optimization): use a method that "
                "needs no features"
            )
        self.head_name, self.source = head_layer(encoder, head), source
        enters = type(self).method.head_input is not FeatureAccess.head_input
        if enters and source.layer is not None:
            raise ConfigurationError(
                f"{type(self).__name__} puts layers of its own in front of the head, whose input the features "
                "are: leave features= out"
            )
        self._capture = FeatureCapture(encoder, self.head_name, source, self._enter if enters else None)
        self._found: tuple[Tensor, ...] = ()
        self._classes: Tensor | None = None
        self._class_counts: dict[int, Tensor] = {}
        self._entered: Tensor | None = None  # the head, in the newest step
        self._scores: Tensor | None = None  # of the head, while the method's own are computed

    # ------------------------------------------------------------------ what methods ask for

    @property
    def head_prefix(self) -> str:  # type: ignore[override]  # of the module's own names
        """What names of the head's parameters begin with."""
        return f"module.{self.head_name}."

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        """The module's own head."""
        return self.module.get_submodule(self.head_name)

    @property
    def encoder(self) -> nn.Module:  # type: ignore[override]
        """The module as far as its features."""
        return self.encoder_by(None)

    def encoder_by(self, step: Callable[..., Any] | None) -> ModuleEncoder:
        """The same, where batches without inputs for ``forward`` go through another step than the module's."""
        kept = tuple(self._kept_in_evaluation)
        return ModuleEncoder(self.module, self._capture, Remaking(self._factory, kept), step)

    @property
    def feature_width(self) -> int:
        """Width of the features, d."""
        return self.source.width

    def copy_head(self) -> nn.Module:
        """The head once more, without dropout."""
        head = cast(nn.Module, super().copy_head())
        return head if isinstance(head, nn.Linear) else head.eval()

    def with_new_head(self, method: Any) -> FederatedClient:
        """A client of another method on a copy of the module, whose head has new values."""
        from pfl_lightning.drop_in.client.made_class import client_class

        module = self.copy_network()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in self._never_trained)
        module.train()
        for name in self._kept_in_evaluation:
            module.get_submodule(name).eval()
        renew(module.get_submodule(self.head_name), self.head_name)
        made: Any = client_class(method)
        parts = {"factory": self._factory, "frozen": self._frozen_patterns, "source": self.source}
        client = cast(ModuleClient, made(module, self.num_classes, head=self._roles, **parts))
        client.local = self.local
        return client

    def encoder_state(self) -> dict[str, Tensor]:
        """The state of the module without its head."""
        state = self.state_dict()
        return {name: state[name] for name in self.match(state, ("encoder.*",)) if name.startswith("module.")}

    def features_of(self, data: FitData) -> tuple[Tensor, Tensor]:
        """Features (n, d) of all training items in evaluation mode, and classes (n,), by passes over their batches."""
        features, classes = self._passes(data).all_features(data)
        highest = int(classes.max())
        if highest >= self.num_classes:
            raise ConfigurationError(
                f"a batch has the class {highest}, and there are {self.num_classes} classes, 0 to "
                f"{self.num_classes - 1}, "
                f"by the data and the head ({self.head_name}): correct labels=, or the width of the head"
            )
        return features, classes

    def count_classes(self, context: FitContext) -> Tensor:
        """Training items of each class, (C,); read once for each client."""
        if context.client not in self._class_counts:
            with isolate_rng():
                classes = self._passes(context.data).all_classes(context.data)
            self._class_counts[context.client] = torch.bincount(classes.cpu(), minlength=self.num_classes)
        return self._class_counts[context.client]

    def classes_of_batch(self, batch: Any) -> Tensor:
        """Classes (N,) of a batch."""
        return classes_of_batch(batch, self.source.labels)

    def _passes(self, data: FitData) -> FeaturePass:
        return FeaturePass(self.module, self._capture, self.source.labels, data.datamodule)

    def classify(self, features: Tensor) -> Tensor:
        """Class scores (N, C) of the head, also where the features are not what it takes."""
        return super().classify(features) if self._scores is None else self._scores

    def _enter(self, features: Tensor) -> Tensor:
        """Bring what the method makes of the features to the head; its own calls of the head have that already."""
        if self._scores is not None:
            return features
        self._entered = None
        self._entered = self.head_input(features)
        return self._entered

    def head_cross_entropy(self, entering: Tensor, labels: Tensor) -> Tensor:
        """The module's own loss of the newest step."""
        return super().head_cross_entropy(entering, labels) if self._own_loss is None else self._own_loss

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The module's own loss, in the place of the cross entropy."""
        if self._own_loss is None or not self.uses("cross_entropy"):
            return {}
        return {"cross_entropy": self._own_loss}
