"""Metrics of torchmetrics by name: what a client's class scores are judged by, beside accuracy and loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import isclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, classification
from torchmetrics.functional.classification import multiclass_confusion_matrix

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.names import did_you_mean, imported


class MajorityShare(Metric):
    """Share of the most frequent class among the labels: the accuracy of a model that gives no other class."""

    higher_is_better = True
    counts: Tensor

    def __init__(self, num_classes: int, validate_args: bool = True) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(num_classes), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count the labels (N,)."""
        self.counts += target.bincount(minlength=len(self.counts))

    def compute(self) -> Tensor:
        """The share, in [0, 1]."""
        return self.counts.max() / self.counts.sum()


NAMED_METRICS: dict[str, tuple[type[Metric], str]] = {
    "balanced_accuracy": (classification.MulticlassRecall, "classes"),
    "f1": (classification.MulticlassF1Score, "classes"),
    "precision": (classification.MulticlassPrecision, "classes"),
    "auroc": (classification.MulticlassAUROC, "rankings"),
    "average_precision": (classification.MulticlassAveragePrecision, "rankings"),
    "calibration_error": (classification.MulticlassCalibrationError, ""),
    "cohen_kappa": (classification.MulticlassCohenKappa, ""),
    "matthews_corrcoef": (classification.MulticlassMatthewsCorrCoef, ""),
    "majority_share": (MajorityShare, ""),
}
"""Metrics by name, and of what each is a mean (see :class:`ClassMetric`). ``balanced_accuracy`` is the mean recall;
``auroc`` and ``average_precision`` are of each class against the others. Means are over the classes of the client's
samples: what it lacks does not count. ``majority_share`` is no score but the floor of accuracy: what a model reaches
that always gives the client's most frequent class."""


CONFUSION = "confusion_matrix"
"""What asks for each client's numbers of samples by class and predicted class, beside the metrics."""

Confusion = tuple[tuple[int, ...], ...]
"""Numbers of samples by class and predicted class, (C, C)."""


@dataclass(frozen=True)
class ClassMetric:
    """A metric of class probabilities (N, C) and labels (N,).

    Attributes:
        metric: The metric of torchmetrics.
        mean_of: ``"classes"`` where it gives a value for each class, of which the mean is taken over those that occur;
            ``"rankings"`` where that is how well it ranks a class's samples above others, which takes samples of both.
    """

    metric: Metric
    mean_of: str = ""

    @property
    def lower_is_better(self) -> bool:
        """Whether the lowest value is the best one."""
        return self.metric.higher_is_better is False

    def value(self, probabilities: Tensor, labels: Tensor) -> float:
        """The value of one client's samples; NaN where it is not defined.

        Args:
            probabilities: Of each class, (N, C).
            labels: Classes, (N,).

        Raises:
            ConfigurationError: The metric does not fit, or gives more than a number.
        """
        name, present = type(self.metric).__name__, labels.unique()
        ranks = self.mean_of == "rankings"
        if ranks and len(present) < 2:
            return math.nan
        metric = self.metric
        try:
            if ranks:  # of the classes that occur alone: torchmetrics warns of each of the others
                metric = type(metric)(num_classes=len(present), average=None, validate_args=False)
                probabilities, labels = probabilities[:, present], torch.searchsorted(present, labels)
            metric.reset()
            metric.update(probabilities, labels)
            found = metric.compute()
            metric.reset()
            if self.mean_of:
                found = (found if ranks else found[present]).mean()
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ConfigurationError(
                f"the metric {name} fails on class probabilities {tuple(probabilities.shape)} and labels "
                f"{tuple(labels.shape)}: {error}. Use a classification metric over {probabilities.shape[1]} classes"
            ) from error
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise ConfigurationError(
                f"the metric {name} gives {found if not isinstance(found, Tensor) else f'values {tuple(found.shape)}'} "
                "for a client, expected one number: choose an average, such as average='macro'"
            )
        return float(found)


def find_metrics(given: Sequence[Any], num_classes: int) -> dict[str, ClassMetric]:
    """Metrics by their names.

    Args:
        given: Names of :data:`NAMED_METRICS`, import paths of classes or classes of torchmetrics, which get
            ``num_classes``, or metrics of torchmetrics, which are named as their classes are;
            ``"confusion_matrix"`` is left out.
        num_classes: Number of classes, C.

    Raises:
        ConfigurationError: One is unknown, is no metric, cannot be made, or is given twice.

    Example:
        >>> [*find_metrics(["f1", "torchmetrics.classification.MulticlassHammingDistance"], 3)]
        ['f1', 'MulticlassHammingDistance']
    """
    if isinstance(given, str):
        given = [given]
    pairs = [_metric(one, num_classes) for one in given if not asks_confusion([one])]
    twice = [name for name, number in Counter(name for name, _ in pairs).items() if number > 1]
    if twice:
        raise ConfigurationError(f"metrics: {twice[0]} is given twice")
    return dict(pairs)


def _metric(given: Any, num_classes: int) -> tuple[str, ClassMetric]:
    if isinstance(given, str) and given in ("accuracy", "loss"):
        raise ConfigurationError(f"metrics: {given!r} is always measured: leave it out")
    if isinstance(given, str) and given in NAMED_METRICS:
        kind, mean_of = NAMED_METRICS[given]
        average: dict[str, Any] = {"average": None} if mean_of else {}
        return given, ClassMetric(kind(num_classes=num_classes, validate_args=False, **average), mean_of)
    made = _imported(given) if isinstance(given, str) else given
    if isclass(made) and issubclass(made, Metric):
        try:
            made = made(num_classes=num_classes)
        except Exception as error:
            raise ConfigurationError(
                f"metrics: {made.__name__}(num_classes={num_classes}) failed: {error}. In Python, pass a metric itself"
            ) from error
    if not isinstance(made, Metric):
        raise ConfigurationError(
            f"metrics: {given!r} is not a metric of torchmetrics: give a name ({', '.join(NAMED_METRICS)}), the import "
            "path of a class, such as torchmetrics.classification.MulticlassHammingDistance, or a metric"
        )
    return type(made).__name__, ClassMetric(made)


def _imported(path: str) -> Any:
    try:
        if not path.startswith("torchmetrics."):  # a config must not import what it likes
            raise ConfigurationError(f"{path!r} is not a metric of torchmetrics")
        return imported(path)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"metrics: {path!r} is unknown{did_you_mean(path, (*NAMED_METRICS, CONFUSION)) or '.'} Give one of "
            f"{', '.join((*NAMED_METRICS, CONFUSION))}, or the import path of a class of torchmetrics; in Python, any"
        ) from error


def asks_confusion(given: Sequence[Any]) -> bool:
    """Whether confusion matrices are among the metrics that are asked for."""
    return any(isinstance(one, str) and one == CONFUSION for one in given)


def confusion_of(scores: Tensor, labels: Tensor) -> Confusion:
    """One client's confusion matrix; empty where a score is NaN.

    Args:
        scores: Class scores, (N, C).
        labels: Classes, (N,).
    """
    if scores.isnan().any():
        return ()
    found = multiclass_confusion_matrix(scores.argmax(1).cpu(), labels.cpu(), scores.shape[1], validate_args=False)
    return tuple(map(tuple, found.tolist()))


def values_of(metrics: Mapping[str, ClassMetric], scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Values of one client's samples, by name; NaN where one is not defined or a score is NaN.

    Args:
        metrics: The metrics.
        scores: Class scores (N, C), of which the softmax gives probabilities.
        labels: Classes, (N,).
    """
    if not metrics or scores.isnan().any():
        return dict.fromkeys(metrics, math.nan)
    with torch.no_grad():
        probabilities, labels = scores.float().softmax(1).cpu(), labels.cpu()  # metrics are many small operations
        return {name: metric.value(probabilities, labels) for name, metric in metrics.items()}
