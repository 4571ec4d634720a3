"""What methods ask of features and classes, wherever the model has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import lightning as L
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.fit.data import FitData
from pfl_lightning.state.closures import copy_module

if TYPE_CHECKING:
    from pfl_lightning.drop_in.features.feature_module import FeatureModule
    from pfl_lightning.fit.context import FitContext


class FeatureAccess(L.LightningModule):
    """Features in front of a linear head, and classes of samples: those of the package's own encoder and head.

    A user's module gives them otherwise (``pfl_lightning.drop_in.features``), so that methods use these names in place
    of the layers.
    """

    feature_based: ClassVar[bool] = False
    """Whether the method needs, beyond a training step and parameters, no more than the features that enter a head and
    the classes of batches, so that it applies to any LightningModule that classifies
    (:func:`pfl_lightning.federate`)."""

    steps_on_modules: ClassVar[bool] = True
    """Whether a feature-based method trains a user's module by its own step, whose loss it adds to; otherwise by an
    objective of two views in the place of that."""

    scores_features: ClassVar[bool] = False
    """Whether a feature-based method passes features of its own through the head, which must then give class scores."""

    head_prefix: str = "head."
    """What names of the head's parameters begin with, in the client's state."""

    partner_encoder: Any = None
    """What makes the encoder of the method's second network, a registered name or a factory: the federation builds it,
    and gives it to :meth:`attach_partner`. ``None`` for no such network."""

    further_encoders: int = 0
    """Number of further encoders like its own that the client or its server begins with: the federation makes each with
    first weights of its own, and gives them to :meth:`take_encoders`."""

    head: Any
    encoder: Any
    frozen: Any
    num_classes: int
    user_module: Any
    active_network: Any

    @property
    def _features(self) -> FeatureModule | None:
        """The user's module, which gives features to a method that is feature-based."""
        return cast("FeatureModule | None", self.user_module)

    def __getattr__(self, name: str) -> Any:
        """Encoder and head of a user's module, which are no layers of the client by themselves; else as in torch."""
        if name in ("encoder", "head") and self.user_module is not None:
            return getattr(self.user_module, name)
        return super().__getattr__(name)

    @property
    def feature_width(self) -> int:
        """Width of the features, d."""
        if self._features is not None:
            return self._features.source.width
        return cast(int, self.head.in_features)

    def attach_partner(self, encoder: nn.Module) -> None:
        """Take the encoder that :attr:`partner_encoder` has made, with first weights that all architectures share."""
        raise NotImplementedError

    def take_encoders(self, encoders: Sequence[nn.Module]) -> None:
        """Take the further encoders; not called where the encoder is a module, of which there is one set of weights."""
        raise NotImplementedError

    def statistics_like(self) -> Tensor:
        """A tensor of the type and device that statistics of features are sent in."""
        weight: Tensor = next(self.head.parameters())
        return weight

    def copy_head(self) -> Any:
        """The head once more, for a server that trains it; it does not train by itself."""
        head = copy_module(self.head).requires_grad_(False)
        return head if isinstance(head, nn.Linear) else head.eval()  # of a user's module: without dropout

    def with_new_head(self, method: Any) -> Any:
        """A client of another method with a new head, on a copy of the encoder.

        All of the copy trains that was not frozen from the start, whatever trained last.
        """
        if self._features is not None:
            return self._features.with_new_head(method)
        encoder = copy_module(self.encoder)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(f"encoder.{name}" not in self.frozen)
        return method(encoder, self.num_classes)

    def stand_in_with_new_head(self, method: Any) -> Any:
        """The same on the network that serves clients which have never trained, where it is another one for them.

        It is alike in all architectures. ``None``, by default, if they are served by the encoder as the others are.
        """
        return None

    def encoder_state(self) -> dict[str, Tensor]:
        """What of the client's state is the encoder that :meth:`with_new_head` copies, by its names there.

        Where a stand-in serves the client now, it is that of :meth:`stand_in_with_new_head`.
        """
        if self._features is not None:
            return self._features.encoder_state()
        return {f"encoder.{name}": value for name, value in self.encoder.state_dict().items()}

    def features_of(self, data: FitData) -> tuple[Tensor, Tensor]:
        """Features (n, d) of all samples at the current encoder, not augmented, without gradient; and labels (n,)."""
        if self._features is not None:
            return self._features.features_of(data)
        return data.features(self.encoder)

    def count_classes(self, context: FitContext) -> Tensor:
        """Training samples of each class, (C,)."""
        if self._features is not None:
            return self._features.count_classes(context)
        return context.data.class_counts(self.num_classes)

    def head_input(self, features: Tensor) -> Tensor:
        """What enters the head, (N, d): the features, or what a method makes of them."""
        return features

    def head_cross_entropy(self, entering: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the head's scores alone; a user's module has its own loss in this place."""
        own = None if self.user_module is None else self.user_module.own_loss
        return F.cross_entropy(self.head(entering), labels) if own is None else own

    def class_scores(self, features: Tensor) -> Tensor:
        """Class scores (N, C) that the client is evaluated by, from features (N, d)."""
        scores: Tensor = self.classify(features)
        return scores

    def representations(self, features: Tensor) -> dict[str, Tensor]:
        """Representations between inputs and scores, by name: the features (N, d), and what is made of them.

        For inspection alone; names are what pictures and scalars call the representations.
        """
        return {"features": features}

    def view_terms(self, views: tuple[Tensor, ...], labels: Tensor) -> dict[str, Tensor]:
        """Further terms of the loss, from the features (N, d) of each augmented view of a batch; none by default."""
        return {}
