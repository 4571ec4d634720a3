"""An encoder without a head is judged by the nearest training sample until a head is trained for it."""

import math
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import CLIENTS, Toy, own_model, quiet_trainer, run
from sklearn.neighbors import KNeighborsClassifier

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.methods import FedAvg
from pfl_lightning.phases import Personalization


class Headless(FedAvg):
    evaluation = "knn"


FIT = partial(Headless, lr=0.05, epochs=1)


def neighbors(federation, client, part):
    """By scikit-learn."""
    data, encoder = Toy(), own_model(federation, client).eval().encoder
    with torch.no_grad():
        known, asked = (encoder(data.tensors(client, which)[0]).numpy() for which in ("train", part))
    classes, expected = (data.tensors(client, which)[1].numpy() for which in ("train", part))
    return KNeighborsClassifier(1, algorithm="brute").fit(known, classes).score(asked, expected)


@pytest.mark.parametrize("name", ["SequentialEngine", "VectorizedEngine", "RayEngine"])
def test_accuracies_are_those_of_scikit_learn(name, monkeypatch):
    engine = {
        "SequentialEngine": lambda: SequentialEngine(),
        "VectorizedEngine": lambda: VectorizedEngine(forward="vmap"),
        "RayEngine": lambda: fake_ray_engine(monkeypatch, 2)[0],
    }[name]()
    federation = run(FIT, 2, engine=engine)
    for scores, part in ((federation.validation_scores, "validation"), (federation.test_scores, "test")):
        for client in range(CLIENTS):
            assert scores[client].accuracy == pytest.approx(neighbors(federation, client, part))
            assert math.isnan(scores[client].loss)
    metrics = federation.trainer.callback_metrics
    assert "test_accuracy/mean" in metrics
    assert not any("loss/mean" in name for name in metrics)


def test_a_personalization_and_a_fine_tuning_are_judged_by_class_scores():
    federation = run(FIT, 1)
    with federation.personalized(Personalization()):
        quiet_trainer(1).test(federation, Toy(), verbose=False)
    assert all(math.isfinite(score.loss) for score in federation.test_scores.values())
    tuned = run(partial(FIT, fine_tune="head"), 1)
    assert all(math.isfinite(score.loss) for score in tuned.test_scores.values())


@pytest.mark.parametrize("name", ["SequentialEngine", "VectorizedEngine"])
def test_clients_of_one_class_and_of_one_sample(name):
    """The only class that a client knows is what it says of every sample."""
    labels = [[2] * 6, [3], [0, 1, 1, 0, 1]]
    data = Toy(labels, test=[4, 4, 8], batch_size=3)
    engine = SequentialEngine() if name == "SequentialEngine" else VectorizedEngine(forward="vmap")
    federation = run(FIT, 1, data=data, cohorts=[[0, 1, 2]], engine=engine)
    assert [federation.test_scores[client].accuracy for client in (0, 1)] == [1.0, 1.0]
    features = own_model(federation, 2).eval().encoder
    with torch.no_grad():
        (known, classes), (asked, expected) = (data.tensors(2, part) for part in ("train", "test"))
        nearest = torch.cdist(features(asked).double(), features(known).double()).argmin(1)
    assert federation.test_scores[2].accuracy == pytest.approx(float((classes[nearest] == expected).float().mean()))
