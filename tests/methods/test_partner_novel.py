"""Clients that never trained: FML and FedKD evaluate, fine-tune and export the common network for them."""

import json
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.plain import named, put, score
from _helpers.plain_partner import first_partner, own_nets
from _helpers.process_helpers import forked_process_engine
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    normed_encoder,
    quiet_trainer,
    run,
    tiny_encoder,
    wide_encoder,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine, export_clients
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FML, FedKD
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import derive_seed

METHODS = pytest.mark.parametrize("method", [FML, FedKD])
ENCODERS = [tiny_encoder, linear_encoder]
ENGINES = pytest.mark.parametrize(
    "make",
    [
        lambda patch: SequentialEngine(),
        lambda patch: TrainerEngine(),
        lambda patch: VectorizedEngine(forward="vmap"),
        lambda patch: fake_ray_engine(patch, 2)[0],
        lambda patch: forked_process_engine(patch, 2),
    ],
    ids=["sequential", "trainer", "vmap", "ray", "processes"],
)


def fit_of(method, **options):
    return partial(method, partner=wide_encoder, lr=0.05, epochs=1, **options)


def common(federation):
    """The common network, in plain torch."""
    net = first_partner(wide_encoder)
    put(net, {name.removeprefix("partner."): t for name, t in federation.server.weights.as_state().items()})
    return net


def assert_scores(federation, data, clients, net, prefix=""):
    for client in clients:
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(net, data, client, "test"), abs=1e-4)


@METHODS
@ENGINES
def test_a_test_scores_the_common_network(method, make, monkeypatch, tmp_path):
    """Of a checkpoint, too; those that trained have their own networks."""
    data, saver = Toy(novel_clients=2), ModelCheckpoint(tmp_path, filename="last")
    options = {"callbacks": [saver], "enable_checkpointing": True, "encoder": ENCODERS, "loop": FederatedLoop()}
    trained = run(fit_of(method), 2, data=data, **options)
    fresh = Federation(fit_of(method), ENCODERS, engine=make(monkeypatch), seed=1)
    quiet_trainer(1).test(fresh, data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert_scores(fresh, data, data.novel, common(trained))
    for client in data.participating:
        net = own_nets(ENCODERS)[client]
        stored = trained.personal.get(client)
        put(net, {name: stored[name] for name in named(net)})
        assert_scores(fresh, data, [client], net)


@METHODS
def test_a_client_has_its_own_network_from_its_first_fit_on(method):
    federation = run(fit_of(method), 1, cohorts=[[0, 1]], encoder=ENCODERS)
    assert_scores(federation, Toy(), [2, 3, 4], common(federation))
    federation = run(fit_of(method), 2, cohorts=[[0, 1], [2]], encoder=ENCODERS)
    assert_scores(federation, Toy(), [3, 4], common(federation))
    assert federation.test_scores[2].loss != pytest.approx(score(common(federation), Toy(), 2, "test")[1], abs=1e-4)


def tuned(net, data, client, train, rate, epochs):
    """Full-batch SGD in plain torch, without momentum."""
    inputs, labels = data.tensors(client)
    for _ in range(epochs):
        parameters = list((net if train == "all" else net.head).parameters())
        gradients = torch.autograd.grad(F.cross_entropy(net(inputs), labels), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
    return net


def by_hand(federation, data, client, train):
    """The common network after the personalization; a new head is that of the stage's last probe."""
    net = common(federation)
    if train == "linear":
        torch.manual_seed(derive_seed(SEED, "personalize/head"))
        *_, head = [nn.Linear(width, CLASSES) for width in (4, 4, 7)]  # after those of both architectures
        put(net, {f"head.{name}": tensor for name, tensor in head.state_dict().items()})
    return tuned(net, data, client, train, rate=0.2, epochs=3)


def assert_personalized(method, engine, train):
    data = Toy(novel_clients=2)
    federation = run(fit_of(method), 1, data=data, encoder=ENCODERS, loop=FederatedLoop(), engine=engine)
    with federation.personalized(Personalization(train, epochs=3, lr=0.2, momentum=0.0, batch_size=1000)):
        quiet_trainer(1).test(federation, data, verbose=False)
    for client in data.novel:
        assert_scores(federation, data, [client], by_hand(federation, data, client, train))
    quiet_trainer(1).test(federation, data, verbose=False)
    assert_scores(federation, data, data.novel, common(federation))  # which nobody's adaptation has changed


@METHODS
@pytest.mark.parametrize("train", ["head", "all", "linear"])
def test_what_a_novel_client_adapts_is_the_common_network(method, train):
    assert_personalized(method, SequentialEngine(), train)


@pytest.mark.repeated
@ENGINES
@pytest.mark.parametrize("train", ["all", "linear"])
def test_it_does_so_under_every_engine(make, train, monkeypatch):
    assert_personalized(FML, make(monkeypatch), train)


@METHODS
def test_the_exported_model_is_the_one_that_was_evaluated(method, tmp_path):
    federation = run(fit_of(method), 1, cohorts=[[0, 1]], encoder=ENCODERS)
    paths = export_clients(federation, tmp_path)
    for client, path in enumerate(paths):
        state, about = torch.load(path, weights_only=True), json.loads(path.with_suffix(".json").read_text())
        assert_same(state, {n: t for n, t in federation.client_model(client).state_dict().items() if n in state})
        assert about["model"] == ("tiny_encoder", "linear_encoder", *["wide_encoder"] * 3)[client]
    assert_same(torch.load(paths[3], weights_only=True), named(common(federation)))
    model, (inputs, labels) = federation.client_model(3), Toy().tensors(3)
    torch.testing.assert_close(model.eval()(inputs), common(federation)(inputs))
    assert set(model.training_step((inputs, labels), 0)) == {"loss", "cross_entropy"}


@METHODS
def test_inspection_finds_the_network_that_is_evaluated(method):
    federation = run(fit_of(method), 1, cohorts=[[0, 1]], encoder=ENCODERS)
    inputs, net = federation.data.client_data(3).test.loader(9).tensors()[0], common(federation).eval()
    for client, model in federation.client_models(range(CLIENTS)):
        scores = model.classify(model.encode(inputs))
        torch.testing.assert_close(scores, model(inputs))
        assert torch.allclose(scores, net.head(net.encoder(inputs))) == (client not in (0, 1))


@METHODS
def test_nothing_is_left_behind(method):
    federation = run(fit_of(method), 2, cohorts=[[0, 1], [2]], encoder=ENCODERS)
    plain = run(fit_of(method), 2, cohorts=[[0, 1], [2]], encoder=ENCODERS, limit_val_batches=0)
    assert all(model.serving is None for model in federation.models)
    assert_same(federation.server.weights.as_state(), plain.server.weights.as_state())
    for client in range(CLIENTS):
        assert_same(federation.personal.get(client), plain.personal.get(client))


@METHODS
def test_batch_normalization_of_the_common_network(method):
    """Its running statistics travel with it."""
    fit = partial(method, partner=normed_encoder, lr=0.05, epochs=1)
    federation = run(fit, 2, loop=GivenCohorts([0, 1]), encoder=ENCODERS, data=Toy(batch_size=9))
    net = first_partner(normed_encoder)
    net.load_state_dict({n.removeprefix("partner."): t for n, t in federation.server.weights.as_state().items()})
    assert_scores(federation, Toy(), [2, 3, 4], net.eval())
