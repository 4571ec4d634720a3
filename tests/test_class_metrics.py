"""Metrics by name, held to scikit-learn over the classes that a client has."""

import math
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassHammingDistance

from pfl_lightning.class_metrics import NAMED_METRICS, find_metrics, values_of
from pfl_lightning.errors import ConfigurationError

CLASSES = 5


def expected(scores, labels):
    """The same of scikit-learn, class by class where it would count classes that do not occur."""
    labels, shares = labels.numpy(), scores.double().softmax(1).numpy()
    predicted, present = shares.argmax(1), np.unique(labels)
    of_class = {"labels": present, "average": "macro", "zero_division": 0.0}
    ranked = [(labels == c, shares[:, c]) for c in present]
    return {
        "balanced_accuracy": sk.recall_score(labels, predicted, **of_class),
        "f1": sk.f1_score(labels, predicted, **of_class),
        "precision": sk.precision_score(labels, predicted, **of_class),
        "auroc": np.mean([sk.roc_auc_score(*pair) for pair in ranked]) if len(present) > 1 else math.nan,
        "average_precision": np.mean([sk.average_precision_score(*pair) for pair in ranked])
        if len(present) > 1
        else math.nan,
        "calibration_error": calibration_error(shares.max(1), predicted == labels),
        "cohen_kappa": sk.cohen_kappa_score(labels, predicted, labels=range(CLASSES)),
        "matthews_corrcoef": sk.matthews_corrcoef(labels, predicted),
        "majority_share": np.bincount(labels).max() / len(labels),
    }


def calibration_error(confidence, right):
    """Over 15 bins of equal width: the gap between confidence and accuracy, weighted by samples (Guo et al., 2017)."""
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [(np.mean(bins == b), confidence[bins == b].mean() - right[bins == b].mean()) for b in np.unique(bins)]
    return sum(share * abs(gap) for share, gap in gaps)


def judged(scores, labels):
    return values_of(find_metrics([*NAMED_METRICS], CLASSES), scores, labels)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(1, CLASSES), st.integers(0, 10_000))
def test_named_metrics_against_scikit_learn(samples, held, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(samples, CLASSES, generator=generator)
    labels = torch.randperm(CLASSES, generator=generator)[torch.randint(held, (samples,), generator=generator)]
    got, want = judged(scores, labels), expected(scores, labels)
    single = len(labels.unique()) == 1  # kappa and the correlation are conventions then
    for name in set(NAMED_METRICS) - ({"cohen_kappa", "matthews_corrcoef"} if single else set()):
        assert got[name] == pytest.approx(want[name], abs=1e-5, nan_ok=True), name


def test_a_model_that_gives_one_class_has_the_floor_and_no_balance():
    labels = torch.tensor([0] * 95 + [1] * 5)
    got = judged(torch.eye(CLASSES)[torch.zeros(100, dtype=torch.long)], labels)
    assert got["majority_share"] == pytest.approx(0.95)
    assert got["balanced_accuracy"] == pytest.approx(0.5)
    assert got["auroc"] == pytest.approx(0.5)


def test_a_class_that_the_client_lacks_does_not_count():
    labels = torch.tensor([0, 0, 1, 1])
    scores = torch.eye(CLASSES)[torch.tensor([0, 4, 1, 1])]  # class 4 is predicted, and is none of the client's
    assert judged(scores, labels)["balanced_accuracy"] == pytest.approx(0.75)


def test_one_class_has_no_ranking_and_nan_scores_have_no_value():
    labels = torch.zeros(3, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(judged(torch.randn(3, CLASSES), labels)["auroc"])
    scores = torch.randn(3, CLASSES)
    scores[0, 0] = math.nan
    assert all(map(math.isnan, judged(scores, labels).values()))


def test_classes_paths_and_metrics_of_torchmetrics():
    micro = MulticlassAccuracy(CLASSES, average="micro")
    found = find_metrics([micro, MulticlassHammingDistance], CLASSES)
    found |= find_metrics(["torchmetrics.classification.MulticlassSpecificity"], CLASSES)
    scores, labels = torch.randn(20, CLASSES), torch.randint(CLASSES, (20,))
    got = values_of(pickle.loads(pickle.dumps(found)), scores, labels)
    assert [*got] == ["MulticlassAccuracy", "MulticlassHammingDistance", "MulticlassSpecificity"]
    assert got["MulticlassAccuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    assert [metric.lower_is_better for metric in found.values()] == [False, True, False]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["balanced_acuracy"], "'balanced_acuracy' is unknown; did you mean 'balanced_accuracy'? Give"),
        (["os.system"], "'os.system' is unknown"),
        (["torchmetrics.functional.accuracy"], "is not a metric of torchmetrics"),
        (["torchmetrics.classification.Nothing"], "is unknown"),
        (["f1", "f1"], "f1 is given twice"),
        (["accuracy"], "always measured"),
        (["torchmetrics.regression.MeanSquaredError"], r"MeanSquaredError\(num_classes=5\) failed"),
    ],
)
def test_what_is_no_metric_is_refused(given, says):
    with pytest.raises(ConfigurationError, match=says if "\\" in says else re.escape(says)):
        find_metrics(given, CLASSES)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (MulticlassConfusionMatrix(CLASSES), r"values \(5, 5\) for a client, expected one number"),
        (MulticlassAccuracy(3), r"fails on class probabilities \(4, 5\)"),
    ],
)
def test_a_metric_that_does_not_fit_says_so(metric, says):
    with pytest.raises(ConfigurationError, match=says):
        values_of(find_metrics([metric], CLASSES), torch.randn(4, CLASSES), torch.tensor([0, 1, 2, 4]))
