"""Which parts of a user's module the clients of a method need: its head, its features; and a client with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.drop_in.client.copies import Factory, copied, frozen_parameters
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.roles import (
    Roles,
    chosen_parts,
    find_roles,
    head_layer,
    is_linear,
    traced_head,
    width_of,
    widths_of_head,
)
from pfl_lightning.drop_in.client.tracing import Trace, trace_batch
from pfl_lightning.drop_in.client.user_module import HeadNeeded, UserModule
from pfl_lightning.drop_in.features.capture import FeatureSource
from pfl_lightning.drop_in.features.feature_module import FeatureModule
from pfl_lightning.drop_in.features.view_module import ViewModule
from pfl_lightning.errors import ConfigurationError


@dataclass(frozen=True)
class ClientParts:
    """Makes the clients of a user's module, whose parts are named by the user or found by tracing a batch.

    Attributes:
        method: Class of the clients.
        settings: Hyper-parameters of the method.
        head: Names or patterns of the layers that are the head; ``None`` to find it, where the method needs one.
        features: Name of the layer whose output are the features; ``None`` for the input of the head.
        labels: Gives the classes of a batch.
        factory: Makes the module once more.
        frozen: Which of the frozen parameters never change.
        personal: Names or patterns of what stays with each client.
        shared: Those of what travels.
    """

    method: type[FederatedClient]
    settings: dict[str, Any]
    head: str | Sequence[str] | None = None
    features: str | None = None
    labels: Callable[[Any], Any] | None = None
    factory: Factory | None = None
    frozen: Sequence[str] | None = None
    personal: str | Sequence[str] = ()
    shared: str | Sequence[str] = ()

    def copied(self, module: L.LightningModule) -> L.LightningModule:
        """A copy of the module, which shares what is frozen."""
        return copied(module, self.factory, frozen_parameters(module, self.frozen))

    def try_out(self, module: L.LightningModule) -> bool:
        """Let wrong hyper-parameters and wrong names be seen before there are data.

        Args:
            module: The module, or a copy, which is not changed.

        Returns:
            Whether the method sets a head apart that is yet to be found.
        """
        if not plain_state(module):
            raise ConfigurationError(
                f"{type(module).__name__} has no parameters: if setup or configure_model makes its layers, call it "
                "before the module is federated"
            )
        layers, given = [layer for layer, _ in module.named_modules() if layer], f"features={self.features!r}"
        if self.features is not None and not self.method.feature_based:
            raise ConfigurationError(f"{given}: {self.method.__name__} needs no features; leave it out")
        if self.features is not None and self.features not in layers:
            raise ConfigurationError(f"{type(module).__name__} has no layer {given}; there are {', '.join(layers)}")
        if self.method.feature_based and self.head is None:
            return True
        roles, classes, source = find_roles(module, self.head or ()), 0, None
        if self.method.feature_based:
            width, scores = widths_of_head(module.get_submodule(head_layer(module, roles)))
            classes, source = scores or 1, FeatureSource(self.features, width or 1, self.labels)
        with isolate_rng():  # of first weights that a method adds
            client = self._client(module, classes, roles, source)
        try:
            client.shared_names()
            client.fixed_names()
            for phase in (*client.phases(), *client.personalization_phases()):
                client.trained_names(phase)
        except HeadNeeded:
            if self.head is not None:
                raise
            return True
        return False

    def make(self, module: L.LightningModule, data: FederatedData) -> FederatedClient:
        """A client of a module that is set up.

        Raises:
            ConfigurationError: The head, or what there is of features and classes, is not known.
        """
        wanted = self.try_out(module)
        roles, on_features = Roles(()) if wanted else find_roles(module, self.head or ()), self.method.feature_based
        unclear = on_features and (wanted or not is_linear(module.get_submodule(head_layer(module, roles))))
        traces = wanted or unclear or self.features is not None
        trace = trace_batch(self.copied(module), data) if traces else Trace()
        roles = traced_head(module, trace, self.method.__name__) if wanted else roles
        if not on_features:
            return self._client(module, data.num_classes, roles)
        name = head_layer(module, roles)
        classes, seen = data.num_classes, trace.inputs.get(name)
        entering, scores = widths_of_head(module.get_submodule(name), seen, trace.outputs.get(name))
        width, place = entering, f"the head {name!r} takes"
        if self.features is not None:
            seen, place = trace.outputs.get(self.features), f"features={self.features!r} gives"
            width = width_of(seen)
        if width is None:
            raise ConfigurationError(
                f"{self.method.__name__} works on features of the shape (batch, d), and {place} "
                f"{seen or trace.problem or 'nothing in a step'}: set features= to a layer with one vector for each "
                "sample"
            ) from trace.error
        if self.method.scores_features and (scores is None or scores < classes or width != entering):
            raise ConfigurationError(
                f"{self.method.__name__} passes features through the head itself: {name!r} takes {entering} numbers "
                f"and gives {scores} scores, expected {width} features and {classes} classes. Leave features= out, and "
                "let the head give one score for each class"
            )
        source = FeatureSource(self.features, width, self.labels)
        return self._client(module, max(classes, scores or 0), roles, source)

    def find_missing_head(self, model: UserModule, data: FederatedData) -> None:
        """Let the model of a client whose method needs no head know it, for a personalization of the head alone.

        Raises:
            ConfigurationError: It is not known which layer is the head.
        """
        if self.head is None and not model.roles:
            trace = trace_batch(self.copied(model.module), data)
            model.roles = traced_head(model.module, trace, "a personalization of the head")

    def _client(
        self, module: L.LightningModule, num_classes: int, roles: Roles, source: FeatureSource | None = None
    ) -> FederatedClient:
        own: dict[str, Any] = {
            "factory": self.factory,
            "frozen": self.frozen,
            "chosen": chosen_parts(module, self.personal, self.shared),
        }
        if source is None:
            model = UserModule(module, roles, **own)
        else:
            kind = FeatureModule if self.method.steps_on_modules else ViewModule
            model = kind(module, roles, source, **own)
        return model.new_client(self.method, num_classes, self.settings)
