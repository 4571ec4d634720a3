"""Inspected samples, and their representations by the clients' models."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _helpers.toy import CLIENTS, Toy, assert_same, for_toy, linear_encoder, run, tiny_encoder

from pfl_lightning.callbacks import FeatureEmbedding, FederatedLoop
from pfl_lightning.callbacks.inspection.probe import Probe
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import DualFed, FedPAC, FedPer, LocalOnly

QUICK = partial(FedPer, epochs=1)


def everything(models):
    """Parameters, persistent and other buffers."""
    return {name: value.clone() for name, value in (*models.named_parameters(), *models.named_buffers())}


def of_client(federation, client, inputs):
    """The features of a client's own model, by the model alone."""
    model = federation.client_model(client).eval()
    with torch.no_grad():
        return model, model.encoder(inputs)


@pytest.mark.parametrize("method", [FedPer, FedPAC])
def test_features_are_those_of_the_clients_own_models(method):
    federation = run(partial(method, epochs=1), 2)
    probe = Probe(federation, clients=3, samples=4)
    before = everything(federation.models)
    found = list(probe.representations(federation))
    assert_same(everything(federation.models), before)
    assert len({own.client for own in found}) == 3
    for own in found:
        inputs, labels = probe.samples(federation, own.client)
        assert own.labels.tolist() == labels.tolist()
        assert list(own.by_name) == ["features"]
        assert torch.equal(own.by_name["features"], of_client(federation, own.client, inputs)[1])


def test_dualfed_has_two_representations():
    federation = run(for_toy(DualFed, epochs=1), 1)
    probe = Probe(federation, samples=4)
    for own in probe.representations(federation):
        model, features = of_client(federation, own.client, probe.samples(federation, own.client)[0])
        assert list(own.by_name) == ["pre_projection", "post_projection"]
        assert torch.equal(own.by_name["pre_projection"], features)
        torch.testing.assert_close(own.by_name["post_projection"], model.projector(features).detach())


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_samples_are_the_clients_own(part):
    data = Toy()
    federation = run(QUICK, data=data)
    probe = Probe(federation, samples=4, part=part)
    assert probe.clients == list(range(CLIENTS))
    for client in probe.clients:
        inputs, labels = probe.samples(federation, client)
        held, classes = data.tensors(client, part)
        places = [int((held == row).all(dim=1).nonzero()) for row in inputs]
        assert places == sorted(set(places))
        assert labels.tolist() == classes[places].tolist()
        assert len(inputs) == 4


def test_the_draws_are_those_of_the_seed():
    def drawn(seed):
        federation = run(QUICK, seed=seed)
        probe = Probe(federation, clients=2, samples=3)
        return probe.clients, [probe.samples(federation, client)[0] for client in probe.clients]

    first, again = drawn(1), drawn(1)
    assert first[0] == again[0]
    assert all(torch.equal(one, other) for one, other in zip(first[1], again[1], strict=True))
    others = [drawn(seed) for seed in (2, 3, 4)]
    assert any(other[0] != first[0] or not torch.equal(other[1][0], first[1][0]) for other in others)


def test_the_common_samples_come_from_all_clients_in_equal_shares():
    data = Toy()
    federation = run(QUICK, data=data)
    probe = Probe(federation, samples=4)
    inputs, labels = probe.common_samples(federation, 10)
    assert len(inputs) == len(labels) == 10
    owners = [
        next(client for client in range(CLIENTS) if (data.tensors(client, "test")[0] == row).all(dim=1).any())
        for row in inputs
    ]
    assert [owners.count(client) for client in range(CLIENTS)] == [2] * CLIENTS
    found = list(probe.representations(federation, common=10))
    for own in found:
        assert torch.equal(own.by_name["features"], of_client(federation, own.client, inputs)[1])
        assert own.labels.tolist() == labels.tolist()


def test_clients_without_samples_are_left_out():
    federation = run(QUICK, data=Toy(test=[0, 3, 8, 0, 1]))
    probe = Probe(federation, samples=4)
    assert probe.clients == [1, 2, 4]
    assert [len(probe.samples(federation, client)[0]) for client in probe.clients] == [3, 4, 1]
    none = Probe(run(QUICK, data=Toy(validation=0)), part="validation")
    assert none.lacks == "no client has samples in its validation split; choose another one by 'part'"


def test_only_clients_that_are_evaluated_in_the_fit_are_inspected():
    chosen = []

    class Watch(FederatedLoop):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            chosen.append((Probe(pl_module).clients, pl_module.data.evaluated_clients()))

    run(QUICK, loop=Watch(eval_cohort=3), data=Toy(novel_clients=1))
    [(clients, evaluated)] = chosen
    assert clients == evaluated
    assert len(clients) == 3


def test_several_encoders():
    federation = run(partial(LocalOnly, epochs=1), encoder=[tiny_encoder, linear_encoder])
    probe = Probe(federation, samples=4)
    for own in probe.representations(federation):
        inputs, _ = probe.samples(federation, own.client)
        assert torch.equal(own.by_name["features"], of_client(federation, own.client, inputs)[1])


@pytest.mark.filterwarnings("ignore:.*left out of the inspection")
def test_a_client_whose_features_are_not_finite_is_named_and_left_out():
    federation = run(QUICK)
    federation.personal.set(2, {name: value * np.nan for name, value in federation.personal.get(2).items()})
    with torch.no_grad():
        federation.server.weights.as_state()["encoder.0.weight"].fill_(1.0)
    probe = Probe(federation, samples=4)
    assert [own.client for own in probe.representations(federation)] == list(
        range(CLIENTS)
    )  # the head is not looked at
    federation.server.weights.as_state()["encoder.0.weight"].fill_(float("inf"))
    with pytest.warns(UserWarning, match="client 0, round 1: features not finite, left out of the inspection"):
        assert list(probe.representations(federation)) == []


def test_no_global_random_state_is_touched():
    federation = run(QUICK)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    list(Probe(federation, 2, 3).representations(federation))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients to inspect must be at least 1, got 0"),
        ({"samples": 0}, "samples to inspect must be"),
        ({"samples": 2.5}, "samples to inspect must be"),
        ({"part": "all"}, r"part must be one of \('train', 'validation', 'test'\), got 'all'"),
    ],
)
def test_settings_without_meaning_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FeatureEmbedding(**options)


def test_items_of_a_user_defined_data_set_cannot_be_selected(monkeypatch):
    federation = run(QUICK)
    items = SimpleNamespace(test=[1, 2, 3])
    monkeypatch.setattr(federation.data, "client_data", lambda client: items)
    assert "single items cannot be selected" in Probe(federation).lacks
