"""A user's LightningModule whose layers train on two views of a client's items, without their classes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any, cast

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pfl_lightning.drop_in.features.capture import ClassesUnknown
from pfl_lightning.drop_in.features.encoder import ModuleEncoder
from pfl_lightning.drop_in.features.feature_module import FeatureModule
from pfl_lightning.drop_in.fits.module_calls import flat_objects
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import ScoringTask
from pfl_lightning.functional import nearest_neighbor_accuracy
from pfl_lightning.lightning_private import trainer_or_none
from pfl_lightning.messages import Broadcast
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.seeding import Purpose, derive_seed, python_seed, torch_seed

_log = logging.getLogger(__name__)

_OF_A_RUN = re.compile(r"(novel_)?(val_|test_)accuracy\b|train/|(round|client|loss|epoch|step)$")
"""Names that a federation itself logs."""

_PACKAGES = ("lightning.", "pytorch_lightning.", "pfl_lightning.")


class ViewModule(FeatureModule):
    """Gives a self-supervised method two views of a batch, and the features of both.

    In the method's own phase the objective takes the place of the module's training step, and the module's optimizers
    train encoder and objective. In a personalization the step is the module's own.
    """

    client: Any
    _received = (0, 0)  # round and client of the newest broadcast
    _classes_missed = False  # which is said once

    def receive(self, broadcast: Broadcast) -> None:
        """Let nothing stay that another client has left in a copy of the module."""
        for copy in self._followers():
            copy.forget()
        self._received = (broadcast.round, broadcast.client)

    def _followers(self) -> list[ModuleEncoder]:
        """Copies of the module that follow it."""
        return [network for network in self.client.modules() if isinstance(network, ModuleEncoder)]

    def new_optimizers(self, configure: Callable[[], Any]) -> Any:
        """As in the base; no schedule may watch what the module's own steps log, which do not run.

        Raises:
            ConfigurationError: One does.
        """
        configured = super().new_optimizers(configure)
        plateau = any(isinstance(one, ReduceLROnPlateau) for one in flat_objects(configured))
        if plateau and self.client.uses("self_supervised"):
            raise self._not_logged(f"{type(self.module).__name__} has a ReduceLROnPlateau")
        return configured

    def check_watched(self, outside: Iterable[Any], inside: Iterable[Any]) -> None:
        """Refuse callbacks that watch what the module's own steps log, unless one of the user's may log it.

        Raises:
            ConfigurationError: Names the callback, and what it may watch.
        """
        for callbacks, known in ((list(outside), _OF_A_RUN), (list(inside), None)):
            foreign = any(not f"{type(each).__module__}.".startswith(_PACKAGES) for each in callbacks)
            for each in [] if foreign or not self.client.uses_knn_evaluation() else callbacks:
                monitor = getattr(each, "monitor", None)
                if isinstance(monitor, str) and not (known and known.match(monitor)):
                    raise self._not_logged(f"{type(each).__name__} watches {monitor!r}")

    def _not_logged(self, what: str) -> ConfigurationError:
        module, method = type(self.module).__name__, type(self.client).__name__
        return ConfigurationError(
            f"{what}, but {method} trains {module} by its own objective, so that its steps do not run and log nothing: "
            "remove what watches their values, or let a callback of the outer Trainer watch train/self_supervised or "
            "val_accuracy/mean (mode='max')"
        )

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The objective of two views of a batch, in the place of the module's step; in a personalization the step."""
        if not self.client.uses("self_supervised"):
            return step
        client, encoder = self.client, self.encoder_by(step)

        @wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            first, second = (encoder.view(view) for view in self.views_of(batch))
            for copy in self._followers():
                copy.module.trainer = trainer_or_none(self.module)  # for its own step
            try:
                terms = client.objective_terms(client.objective(encoder, first, second))
                return cast(dict[str, Tensor], client.sum_of_terms(terms))
            finally:
                for copy in self._followers():
                    copy.module.trainer = None

        return training_step

    def with_method_terms(self, output: Any) -> Any:
        """What the step returned: all terms are in it."""
        return output

    def evaluate(self, task: ScoringTask) -> EvalMetrics:
        """Accuracy of the nearest training item by features; after a personalization what the module's steps give.

        Where classes are not known, the accuracy is not a number.
        """
        if not self.client.uses_knn_evaluation():
            return super().evaluate(task)
        seed = derive_seed(task.environment.seed, Purpose.EVALUATION_MODEL, *self._received)
        with torch_seed(seed), python_seed(seed):  # for random transforms of the items
            try:
                known, classes = self.features_of(task.data)
                features, targets = self.features_of(replace(task.data, part=task.part))
            except ClassesUnknown as error:
                if not self._classes_missed:
                    self._classes_missed = True
                    _log.warning("no accuracy of %s by nearest neighbors: %s", type(self.client).__name__, error)
                return EvalMetrics(math.nan, math.nan, len(task.part))
        accuracy = nearest_neighbor_accuracy(known.float(), classes, features.float(), targets)
        return EvalMetrics(float(accuracy), math.nan, len(task.part))
