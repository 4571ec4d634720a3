"""A client that trains a user's LightningModule under a method that works on features in front of a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.client.features import FeatureAccess
from pfl_lightning.data import FitData, SplitSource, TwoViews
from pfl_lightning.drop_in.client.head import head_layer, renew
from pfl_lightning.drop_in.client.module_client import ModuleClient
from pfl_lightning.drop_in.client.module_options import TRAINING
from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.drop_in.features.capture import FeatureCapture, FeatureSource, classes_of_batch
from pfl_lightning.drop_in.features.passes import FeaturePass, hooks_on_each_view
from pfl_lightning.drop_in.fits.patching import patched
from pfl_lightning.engines.tasks import FitEnvironment, MakeTrainer
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.metrics import EvalMetrics

__all__ = ["FeatureModuleClient"]


class FeatureModuleClient(ModuleClient):
    """Stands behind the method among a client's bases: gives it encoder, head, features and classes of a user's module.

    The features are seen by a hook in the module's own training step. Its loss takes the place of the cross entropy,
    and the method's terms are added.

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
                f"{type(self).__name__} adds terms to the loss that training_step returns, and "
                f"{type(encoder).__name__} "
                "steps its optimizers by itself (manual optimization): use a method that needs no features"
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
        return _Encoder(self)

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

    # ------------------------------------------------------------------ a fit

    def method_terms(self, own_loss: Tensor | None = None) -> dict[str, Tensor]:
        """The parts of the loss by name, from the module's own loss, and features and classes of the newest step."""
        assert self._classes is not None
        self._own_loss = own_loss
        try:
            return self.loss_terms(self._found[0], self._classes) | self.view_terms(self._found, self._classes)
        finally:
            self._own_loss = self._entered = None
            self._found = ()

    def with_method_terms(self, output: Any) -> Any:
        """What the module's step returned, with the sum of the phase's terms as its loss."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            return output
        terms = self.method_terms(loss)
        if list(terms) == ["cross_entropy"]:
            return output
        summed = self.sum_of_terms(terms)
        rest = output if isinstance(output, dict) else {}
        return {**rest} | {"module_loss" if n == "cross_entropy" else n: value for n, value in summed.items()}

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The module's step, whose features and classes are kept for the method's terms."""

        @wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            views = self._views_of(batch)
            with self._capture.watching():
                output = step(views[0], *args, **kwargs)
                if output is None:
                    return None
                found = [self._capture.take()]
            for view in views[1:]:
                found.append(FeaturePass(self.module, self._capture, None, None, step).features(view))
            self._found, self._classes = tuple(found), self.classes_of_batch(views[0])
            if len(self._classes) != len(found[0]):
                raise ConfigurationError(
                    f"a batch has {len(self._classes)} classes, and {self._capture.place} has {len(found[0])} rows: "
                    "name by "
                    "features= a layer with one vector for each sample, or correct labels="
                )
            return output

        return training_step

    def _views_of(self, batch: Any) -> tuple[Any, ...]:
        """The batch, or its two views."""
        if isinstance(batch, TwoViews):
            return tuple(batch)
        if self.views == 1 or self.phase.plain:
            return (batch,)
        inputs, labels = batch  # of the package's own data
        return tuple((view, labels) for view in inputs.unbind(1))

    def new_optimizers(self, configure: Callable[[], Any]) -> Any:
        """The module's own optimizers, of which the first also trains what the method has beside the module."""
        module = [p for name, p in self.module.named_parameters() if name not in self._never_trained]
        frozen = not any(parameter.requires_grad for parameter in module)
        if frozen:  # a phase of the method's own layers alone, in which an optimizer over nothing could not be made
            nn.ParameterList(module).requires_grad_(True)
        try:
            configured = super().new_optimizers(configure)
        finally:
            if frozen:
                nn.ParameterList(module).requires_grad_(False)
        beside = [p for name, p in self.named_parameters() if not name.startswith("module.") and p.requires_grad]
        optimizer = _first_optimizer(configured)
        if beside and optimizer is not None:
            optimizer.param_groups[-1]["params"].extend(beside)
        return configured

    def fit_under_trainer(
        self, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
    ) -> dict[str, float]:
        """Train the module, whose features are seen; see :meth:`ModuleClient.fit_under_trainer`."""
        own = patched(self.module, training_step=self._watched(self.module.training_step))
        with own, hooks_on_each_view(self.module), hooks_on_each_view(context.data.datamodule):
            return super().fit_under_trainer(make_trainer, context, generator)

    @contextmanager
    def recorded_logs(self, record: dict[str, list[Tensor]] | None = None) -> Iterator[dict[str, list[Tensor]]]:
        """Let the module train without a Trainer, its features seen."""
        if self.views > 1 and is_overridden("on_after_batch_transfer", self.module):
            raise ConfigurationError(
                f"{type(self.module).__name__} overrides on_after_batch_transfer, which SequentialEngine does not "
                "call for "
                "each of two views: use TrainerEngine"
            )
        own = patched(self.module, training_step=self._watched(self.module.training_step))
        with own, super().recorded_logs(record) as logged:
            yield logged

    # ------------------------------------------------------------------ an evaluation

    def evaluate(
        self, part: SplitSource, stage: str, data: FitData, environment: FitEnvironment, make_trainer: MakeTrainer
    ) -> EvalMetrics:
        """What the module's own validation or test step logs; its head gives the scores that the method predicts by."""
        with self._predicting():
            return super().evaluate(part, stage, data, environment, make_trainer)

    @contextmanager
    def _predicting(self) -> Iterator[None]:
        """Let the head give the method's own class scores inside, where it predicts otherwise."""
        own = type(self)
        if own.class_scores is FeatureAccess.class_scores and own.classify is FeatureModuleClient.classify:
            yield
            return
        handle = self.head.register_forward_hook(self._as_predicted)
        try:
            with self._capture.watching():
                yield
        finally:
            handle.remove()

    def _as_predicted(self, layer: nn.Module, arguments: Any, output: Any) -> Any:
        if self._scores is not None or not isinstance(output, Tensor):
            return output
        self._scores = output
        try:
            return self.class_scores(self._capture.take()).to(output.dtype)
        finally:
            self._scores = self._entered = None


class _Encoder(nn.Module):
    """A user's module as far as its features."""

    def __init__(self, client: FeatureModuleClient) -> None:
        super().__init__()
        self.module, self.out_features = client.module, client.feature_width
        self._features = FeaturePass(client.module, client._capture, None, None).features_of_inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (N, d)."""
        return self._features(inputs)


def _first_optimizer(configured: Any) -> Optimizer | None:
    if isinstance(configured, Optimizer):
        return configured
    parts = configured.values() if isinstance(configured, dict) else configured
    found = (_first_optimizer(part) for part in (parts if isinstance(configured, dict | tuple | list) else ()))
    return next((optimizer for optimizer in found if optimizer is not None), None)
