"""A user's LightningModule as a model with features in front of a head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.data import TwoViews
from pfl_lightning.drop_in.client.roles import head_layer, renew
from pfl_lightning.drop_in.client.user_module import UserModule
from pfl_lightning.drop_in.features.capture import (
    FeatureCapture,
    FeatureSource,
    classes_of_batch,
    hooks_on_each_view,
    say_if_equal,
    unstacked,
)
from pfl_lightning.drop_in.features.encoder import ModuleEncoder
from pfl_lightning.drop_in.fits.module_calls import flat_objects, patched, training
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import MakeTrainer, ScoringTask
from pfl_lightning.metrics import EvalMetrics


class FeatureModule(UserModule):
    """Gives a method on features the encoder, the head, the features and the classes of a user's module.

    The features are seen by a hook in the module's own training step. Its loss takes the place of the cross entropy,
    and the method's terms are added.

    Args:
        module: The module, which is not copied.
        roles: The parameters of its head, which are those of one layer.
        source: Where features and classes are.
        options: See :class:`~pfl_lightning.drop_in.client.user_module.UserModule`.
    """

    def __init__(self, module: Any, roles: Any, source: FeatureSource, **options: Any) -> None:
        super().__init__(module, roles, **options)
        self.head_name, self.source = head_layer(module, roles), source
        self._capture: FeatureCapture
        self._compared = False  # two views, which is done once
        self._found: tuple[Tensor, ...] = ()
        self._classes: Tensor | None = None
        self._class_counts: dict[int, Tensor] = {}
        self._entered: Tensor | None = None  # the head, in the newest step

    def mount(self) -> None:
        """Become a part of the client, which takes its features from the module."""
        super().mount()
        method = type(self.client)
        if not self.module.automatic_optimization:
            raise ConfigurationError(
                f"{method.__name__} computes the training loss from the module's features, but "
                f"{type(self.module).__name__} steps its optimizers itself (manual optimization): use a method that "
                "needs no features"
            )
        enters = method.head_input is not FederatedClient.head_input
        if enters and self.source.layer is not None:
            raise ConfigurationError(
                f"{method.__name__} puts its own layers in front of the head, so the features are the head's input: "
                "leave features= out"
            )
        self._capture = FeatureCapture(self.module, self.head_name, self.source, self._enter if enters else None)
        self._capture.compared = not method.steps_on_modules  # whose own steps take them from forward
        self.client.head_prefix = f"module.{self.head_name}."
        for step in (self.forward, self.training_step, self.steps_on_features):  # whatever steps the method has
            setattr(self.client, step.__name__, step)
        self.client.head_input = self._head_input  # type: ignore[method-assign]  # computed once in a step

    # ------------------------------------------------------------------ what methods ask for

    @property
    def head(self) -> nn.Module:
        """The module's own head."""
        return self.module.get_submodule(self.head_name)

    @property
    def encoder(self) -> nn.Module:
        """The module as far as its features."""
        return self.encoder_by(None)

    def encoder_by(self, step: Callable[..., Any] | None) -> ModuleEncoder:
        """The same, where batches without inputs for ``forward`` go through another step than the module's."""
        return ModuleEncoder(self.module, self._capture, self.factory, self.kept_in_evaluation, step)

    def with_new_head(self, method: type[FederatedClient]) -> FederatedClient:
        """A client of another method on a copy of the module, whose head has new values."""
        module = self.copy_network()
        self.thaw(module)
        module.train()
        for name in self.kept_in_evaluation:
            module.get_submodule(name).eval()
        renew(module.get_submodule(self.head_name), self.head_name)
        model = FeatureModule(module, self.roles, self.source, factory=self.factory, frozen=self.frozen_patterns)
        model.local = self.local
        return model.new_client(method, self.client.num_classes, {})

    def encoder_state(self) -> dict[str, Tensor]:
        """The state of the module without its head."""
        state = self.client.state_dict()
        return {name: state[name] for name in self.match(state, ("encoder.*",)) if name.startswith("module.")}

    def features_of(self, data: FitData) -> tuple[Tensor, Tensor]:
        """Features (n, d) of all training items in evaluation mode, and classes (n,), by passes over their batches."""
        features, classes = self.encoder_by(None).features_and_classes(data, self.source.labels)
        highest, known = int(classes.max()), self.client.num_classes
        if highest >= known:
            raise ConfigurationError(
                f"a batch has the class {highest}, but there are {known} classes, 0 to {known - 1}, by the data and "
                f"the head ({self.head_name}): correct labels=, or the width of the head"
            )
        return features, classes

    def count_classes(self, context: FitContext) -> Tensor:
        """Training items of each class, (C,); read once for each client."""
        if context.client not in self._class_counts:
            with isolate_rng():
                classes = self.encoder_by(None).classes_of(context.data, self.source.labels)
            counts = torch.bincount(classes.cpu(), minlength=self.client.num_classes)
            self._class_counts[context.client] = counts
        return self._class_counts[context.client]

    def classes_of_batch(self, batch: Any) -> Tensor:
        """Classes (N,) of a batch."""
        return classes_of_batch(batch, self.source.labels)

    def _head_input(self, features: Tensor) -> Tensor:
        """What enters the head; in and after a step of the module what has entered it, which is computed once."""
        return type(self.client).head_input(self.client, features) if self._entered is None else self._entered

    def _enter(self, features: Tensor) -> Tensor:
        """Bring what the method makes of the features to the head; its own calls of the head have that already."""
        if self.scores is not None:
            return features
        self._entered = None
        self._entered = self._head_input(features)
        return self._entered

    # ------------------------------------------------------------------ a fit

    def loss_terms(self) -> dict[str, Tensor]:
        """The module's own loss, in the place of the cross entropy."""
        if self.own_loss is None or not self.client.uses("cross_entropy"):
            return {}
        return {"cross_entropy": self.own_loss}

    def method_terms(self, own_loss: Tensor | None = None) -> dict[str, Tensor]:
        """The parts of the loss by name, from the module's own loss, and features and classes of the newest step."""
        assert self._classes is not None
        self.own_loss, client = own_loss, self.client
        try:
            return client.loss_terms(self._found[0], self._classes) | client.view_terms(self._found, self._classes)
        finally:
            self.own_loss = self._entered = None
            self._found = ()

    def sum_of_terms(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same, of the phase's terms; the module's own loss under its usual name."""
        summed = {} if list(terms) == ["cross_entropy"] else self.client.sum_of_terms(terms)
        return {"module_loss" if name == "cross_entropy" else name: value for name, value in summed.items()}

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The module's step, whose features and classes are kept for the method's terms."""

        @wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            views = self.views_of(batch)
            with self._capture.watching():
                output = step(views[0], *args, **kwargs)
                if output is None:
                    return None
                found = [self._capture.take()]
                if self._capture.calls > 1:
                    warnings.warn(
                        f"a training step of {type(self.module).__name__} computes features {self._capture.calls} "
                        f"times ({self._capture.place}), and {type(self.client).__name__} uses only those of the last "
                        "call: call the model once, or set features= to a layer that is called once",
                        stacklevel=2,
                    )
            for view in views[1:]:
                found.append(self.encoder_by(step).of_batch(view))
            self._found, self._classes = tuple(found), self.classes_of_batch(views[0])
            if len(self._classes) != len(found[0]):
                raise ConfigurationError(
                    f"a batch has {len(self._classes)} classes, and {self._capture.place} has {len(found[0])} rows: "
                    "set features= to a layer with one vector for each sample, or correct labels="
                )
            return output

        return training_step

    def views_of(self, batch: Any) -> tuple[Any, ...]:
        """The batch, or its two views."""
        if isinstance(batch, TwoViews):
            views = tuple(batch)
        elif self.client.views == 1 or self.client.phase.plain:
            return (batch,)
        else:
            views = unstacked(batch)
        if not self._compared:
            self._compared = True
            say_if_equal(views, type(self.client).__name__)
        return views

    def new_optimizers(self, configure: Callable[[], Any]) -> Any:
        """The module's own optimizers, of which the first also trains what the method has beside the module."""
        own = {n: p for n, p in self.module.named_parameters() if f"module.{n}" not in self.client.never_trained}
        # In a phase of the method's own layers alone an optimizer over nothing could not be made.
        frozen = not any(parameter.requires_grad for parameter in own.values())
        with training(self.module, dict.fromkeys(own, True) if frozen else {}):
            configured = super().new_optimizers(configure)
        others = self.client.named_parameters()
        beside = [p for name, p in others if not name.startswith("module.") and p.requires_grad]
        optimizer = next((one for one in flat_objects(configured) if isinstance(one, Optimizer)), None)
        if beside and optimizer is not None:
            optimizer.param_groups[-1]["params"].extend(beside)
        return configured

    def fit_under_trainer(
        self, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
    ) -> dict[str, float]:
        """Train the module, whose features are seen; see :meth:`UserModule.fit_under_trainer`."""
        # The inner of two steps in the module's place: `fit_module` puts what adds the method's terms around it.
        with (
            patched(self.module, training_step=self.watched(self.module.training_step)),
            hooks_on_each_view(self.module, partial(self._views_are_stacked, context)),
            hooks_on_each_view(context.data.datamodule),
        ):
            return super().fit_under_trainer(make_trainer, context, generator)

    def _views_are_stacked(self, context: FitContext) -> bool:
        """Whether the inner Trainer now trains on two views in one tensor, those of the package's own data."""
        single = self.client.views == 1 or self.client.phase.plain or context.data.datamodule is not None
        return not single and self.module.trainer.training

    @contextmanager
    def recorded_logs(self) -> Iterator[None]:
        """Let the module train without a Trainer, its features seen."""
        if self.client.views > 1 and is_overridden("on_after_batch_transfer", self.module):
            raise ConfigurationError(
                f"{type(self.module).__name__} overrides on_after_batch_transfer, which SequentialEngine does not call "
                "for each of two views: use TrainerEngine"
            )
        with patched(self.module, training_step=self.watched(self.module.training_step)), super().recorded_logs():
            yield

    # ------------------------------------------------------------------ an evaluation

    def evaluate(self, task: ScoringTask) -> EvalMetrics:
        """What the module's own validation or test step logs; its head gives the scores that the method predicts by."""
        method = type(self.client)
        if method.class_scores is FederatedClient.class_scores and method.classify is FederatedClient.classify:
            return super().evaluate(task)
        handle = self.head.register_forward_hook(self._as_predicted)
        try:
            with self._capture.watching():
                return super().evaluate(task)
        finally:
            handle.remove()

    def _as_predicted(self, layer: nn.Module, arguments: Any, output: Any) -> Any:
        if self.scores is not None or not isinstance(output, Tensor):
            return output
        self.scores = output
        try:
            return self.client.class_scores(self._capture.take()).to(output.dtype)
        finally:
            self.scores = self._entered = None
