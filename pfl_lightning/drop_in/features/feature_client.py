"""A client that trains a user's LightningModule under a method that works on features in front of a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import FitContext
from pfl_lightning.client.features import FeatureAccess
from pfl_lightning.data import SplitSource, TwoViews
from pfl_lightning.drop_in.features.feature_parts import FeatureParts
from pfl_lightning.drop_in.features.passes import FeaturePass
from pfl_lightning.drop_in.features.views import hooks_on_each_view, say_if_equal, unstacked
from pfl_lightning.drop_in.fits.module_calls import flat_objects, patched
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment, MakeTrainer
from pfl_lightning.metrics import EvalMetrics

__all__ = ["FeatureModuleClient"]


class FeatureModuleClient(FeatureParts):
    """Stands behind the method among a client's bases: gives it encoder, head, features and classes of a user's module.

    The features are seen by a hook in the module's own training step. Its loss takes the place of the cross entropy,
    and the method's terms are added.
    """

    _compared = False  # two views, which is done once

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
            views = tuple(batch)
        elif self.views == 1 or self.phase.plain:
            return (batch,)
        else:
            views = unstacked(batch)
        if not self._compared:
            self._compared = True
            say_if_equal(views, type(self).__name__)
        return views

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
        optimizer = next((one for one in flat_objects(configured) if isinstance(one, Optimizer)), None)
        if beside and optimizer is not None:
            optimizer.param_groups[-1]["params"].extend(beside)
        return configured

    def fit_under_trainer(
        self, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
    ) -> dict[str, float]:
        """Train the module, whose features are seen; see :meth:`ModuleClient.fit_under_trainer`."""
        own = patched(self.module, training_step=self._watched(self.module.training_step))
        with (
            own,
            hooks_on_each_view(self.module, partial(self._views_are_stacked, context)),
            hooks_on_each_view(context.data.datamodule),
        ):
            return super().fit_under_trainer(make_trainer, context, generator)

    def _views_are_stacked(self, context: FitContext) -> bool:
        """Whether the inner Trainer now trains on two views in one tensor, those of the package's own data."""
        single = self.views == 1 or self.phase.plain or context.data.datamodule is not None
        return not single and self.module.trainer.training

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
        if own.class_scores is FeatureAccess.class_scores and own.classify is FeatureParts.classify:
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
