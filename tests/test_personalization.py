"""The stage after the training: a head on frozen features, or more, on every client's own data."""

from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import (
    CLIENTS,
    Toy,
    assert_same,
    linear_encoder,
    own_model,
    quiet_trainer,
    run,
    tiny_encoder,
    whole_state,
)
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FedAvg, FedBABU, FedClassAvg, FedPer, FedRoD, LGFedAvg, PFedHN
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import seeded_generator

SEED = 11


def personalize(federation, settings, engine=None, data=None):
    federation.engine = engine or SequentialEngine()
    with federation.personalized(settings):
        quiet_trainer(1).test(federation, data or Toy(), verbose=False)
    return dict(federation.test_scores)


def plain_probe(federation, client, settings):
    """Test loss after the stage, in plain torch: a new head on the features of the client's own encoder."""
    data = Toy()
    encoder = own_model(federation, client).eval().encoder
    with torch.no_grad():
        features = {part: encoder(data.tensors(client, part)[0]) for part in ("train", "test")}
    targets = {part: data.tensors(client, part)[1] for part in ("train", "test")}
    head = torch.nn.Linear(4, 5)
    head.load_state_dict({name: value.clone() for name, value in first_head(federation, settings).items()})
    optimizer = torch.optim.SGD(
        head.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    generator = seeded_generator(SEED, "personalize/0", federation.round, client)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(targets["train"]), generator=generator).split(settings.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(head(features["train"][rows]), targets["train"][rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(F.cross_entropy(head(features["test"]), targets["test"]))


def first_head(federation, settings):
    """The new head that all clients start from."""
    found = []

    class Looks(SequentialEngine):
        def start(self, models, data, environment):
            found.append({name: value.clone() for name, value in models[0].head.state_dict().items()})

    personalize(federation, settings, Looks())
    return found[0]


@pytest.mark.parametrize("method", [FedAvg, FedPer, LGFedAvg, PFedHN], ids=lambda method: method.__name__)
def test_a_new_head_is_that_of_a_plain_loop(method):
    settings = Personalization(epochs=4, lr=0.1, weight_decay=0.01, batch_size=5)
    federation = run(partial(method, lr=0.05, epochs=1), 2)
    expected = [plain_probe(federation, client, settings) for client in range(CLIENTS)]
    scores = personalize(federation, settings)
    assert [score.loss for score in scores.values()] == pytest.approx(expected, abs=1e-6)


def engines(monkeypatch):
    return {
        "TrainerEngine": TrainerEngine(),
        "VectorizedEngine": VectorizedEngine(forward="vmap"),
        "RayEngine": fake_ray_engine(monkeypatch, 2)[0],
    }


@pytest.mark.repeated
@pytest.mark.parametrize("name", ["TrainerEngine", "VectorizedEngine", "RayEngine"])
@pytest.mark.parametrize("train", ["linear", "linear+encoder", "head", "all"])
@pytest.mark.parametrize("method", [FedPer, FedRoD, FedClassAvg], ids=lambda method: method.__name__)
def test_engines_agree(method, train, name, monkeypatch):
    federation = run(partial(method, lr=0.05, epochs=1), 2)
    settings = Personalization(train, epochs=2, lr=0.05, batch_size=6)
    expected = personalize(federation, settings)
    found = personalize(federation, settings, engines(monkeypatch)[name])
    assert [s.accuracy for s in found.values()] == [s.accuracy for s in expected.values()]
    assert [s.loss for s in found.values()] == pytest.approx([s.loss for s in expected.values()], abs=1e-5)


def test_all_and_head_are_the_methods_own_fine_tuning():
    """FedAvg-FT, FedBABU and the stage share one mechanism."""
    for train in ("head", "all"):
        options = {"lr": 0.05, "epochs": 1, "momentum": 0.9, "weight_decay": 0.0}
        tuned = run(partial(FedAvg, fine_tune=train, fine_tune_epochs=3, **options), 2, data=Toy(batch_size=6))
        plain = run(partial(FedAvg, **options), 2, data=Toy(batch_size=6))
        settings = Personalization(train, epochs=3, lr=0.05, batch_size=6)
        assert personalize(plain, settings, data=Toy(batch_size=6)) == tuned.test_scores


@pytest.mark.parametrize("fine_tune", [None, "head"])
@pytest.mark.parametrize("name", [None, "VectorizedEngine"])
def test_nothing_is_the_evaluation_without_the_stage(fine_tune, name, monkeypatch):
    """Of all clients, those that never train included; what the method itself adapts is adapted."""
    fit = partial(FedAvg, lr=0.05, epochs=1, fine_tune=fine_tune)
    federation = run(fit, 2, data=Toy(novel_clients=2), loop=FederatedLoop())
    engine = None if name is None else engines(monkeypatch)[name]
    quiet_trainer(1).test(federation, Toy(novel_clients=2), verbose=False)
    expected = dict(federation.test_scores)
    assert sorted(expected) == list(range(CLIENTS))
    settings = Personalization("nothing", lr=0.5, augment=True)
    found = personalize(federation, settings, engine, data=Toy(novel_clients=2))
    assert [s.accuracy for s in found.values()] == [s.accuracy for s in expected.values()]
    assert [s.loss for s in found.values()] == pytest.approx([s.loss for s in expected.values()], abs=1e-5)


def test_the_federation_stays_as_it_was():
    federation = run(partial(FedBABU, lr=0.05, epochs=1), 2)
    before, own = whole_state(federation), dict(federation.test_scores)
    for train in ("linear", "linear+encoder", "all", "nothing"):
        personalize(federation, Personalization(train, lr=0.5))
    assert_same(whole_state(federation), before)
    quiet_trainer(1).test(federation, Toy(), verbose=False)
    assert federation.test_scores == own


def test_several_encoders_and_novel_clients():
    data = Toy(novel_clients=2)
    options = {"encoder": [tiny_encoder, linear_encoder], "loop": FederatedLoop()}
    federation = run(partial(LGFedAvg, lr=0.05, epochs=1), 2, data=data, **options)
    scores = personalize(federation, Personalization(lr=0.1, batch_size=6), data=Toy(novel_clients=2))
    assert sorted(scores) == list(range(CLIENTS))
    metrics = federation.trainer.callback_metrics
    novel = sum(scores[client].accuracy for client in data.novel) / 2
    assert float(metrics["novel_test_accuracy/mean"]) == pytest.approx(novel)
    vectorized = personalize(federation, Personalization(lr=0.1, batch_size=6), VectorizedEngine(forward="vmap"))
    assert [s.loss for s in vectorized.values()] == pytest.approx([s.loss for s in scores.values()], abs=1e-5)


def test_features_are_computed_once():
    rows = []

    def encoder(shape):
        module = tiny_encoder(shape)
        module.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
        return module

    federation = run(partial(FedAvg, lr=0.05, epochs=1), 1, encoder=encoder)
    rows.clear()
    personalize(federation, Personalization(epochs=10, batch_size=4), SequentialEngine(threads=1))
    sizes = [len(own) for own in Toy().labels]
    looks = sum(3 * min(16, size) for size in sizes)  # whether the encoder is as in evaluation mode
    assert sum(rows) == sum(sizes) + looks + 8 * CLIENTS  # training samples once, test samples once


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"train": "tail"}, "personalize.train must be"),
        ({"epochs": 0}, "personalize.epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "personalize.batch_size must be at least 1"),
        ({"lr": 0.0}, "personalize.lr must be"),
        ({"momentum": -0.1}, "personalize.momentum must be"),
    ],
)
def test_arguments_are_checked(options, error):
    with pytest.raises(ValueError, match=error):
        Personalization(**options)
