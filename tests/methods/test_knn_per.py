"""kNN-Per against plain torch, FedAvg and the nearest neighbor."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    Toy,
    assert_same,
    normed_encoder,
    own_model,
    run,
    tiny_encoder,
    whole_state,
)

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.exported import export_clients
from pfl_lightning.functional import nearest_neighbor_accuracy
from pfl_lightning.methods import FedAvg, KNNPer
from pfl_lightning.phases import Personalization

LR, EPOCHS = 0.05, 2
COHORTS = [[0, 2, 3], [1, 2]]
FIT = partial(KNNPer, lr=LR, epochs=EPOCHS)
PARTS = {"validation": [5, 0, 9, 1, 20]}


def trained_net(data):
    """FedAvg in plain torch."""
    net = first_net()
    for round, cohort in enumerate(COHORTS):
        uploads = []
        for client in cohort:
            local = copy_of(net)
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR)
            uploads.append(named(local))
        put(net, mean_of(uploads, [len(data.labels[k]) for k in cohort]))
    return net.double()


@torch.no_grad()
def mixed(net, data, client, part, weight, k=10, scale=1.0):
    """lambda p_knn + (1 - lambda) p of the samples of a part, one by one."""
    inputs, labels = data.tensors(client)
    known, rows = net.encoder(inputs.double()), []
    for query in data.tensors(client, part)[0].double():
        distances = ((known - net.encoder(query)) ** 2).sum(1)
        nearest = sorted(range(len(labels)), key=lambda i, d=distances: float(d[i]))[:k]
        neighbors = torch.zeros(CLASSES, dtype=torch.float64)
        for i in nearest:
            neighbors[labels[i]] += math.exp(-float(distances[i]) / (FEATURES * scale))
        rows.append(weight * neighbors / neighbors.sum() + (1 - weight) * net(query).softmax(0))
    return torch.stack(rows)


def loss_of(probabilities, labels):
    return -float(probabilities.clamp(min=1.2e-38).log()[range(len(labels)), labels].mean())


@pytest.mark.parametrize("options", [{"weight": 0.3}, {"k": 3, "scale": 0.2}], ids=["given", "chosen"])
def test_rounds_equal_the_restatement(options):
    data = Toy(**PARTS)
    federation = run(partial(FIT, **options), 2, cohorts=COHORTS, data=data)
    net, settings = trained_net(data), {key: options[key] for key in ("k", "scale") if key in options}
    assert_same(federation.server.weights.as_state(), named(net.float()), atol=1e-6)
    net, chosen = net.double(), set()
    for client in range(CLIENTS):
        held_out = data.tensors(client, "validation")[1]
        weight = options.get("weight", 0.5)
        if "weight" not in options and len(held_out):
            grid = [step / 10 for step in range(11)]
            losses = [loss_of(mixed(net, data, client, "validation", w, **settings), held_out) for w in grid]
            weight = grid[losses.index(min(losses))]
        chosen.add(weight)
        expected, labels = mixed(net, data, client, "test", weight, **settings), data.tensors(client, "test")[1]
        score = federation.test_scores[client]
        assert score.loss == pytest.approx(loss_of(expected, labels), abs=1e-5)
        assert score.accuracy == float((expected.argmax(1) == labels).double().mean())
    assert len(chosen) > 2 or "weight" in options


def test_without_neighbors_it_is_fedavg():
    got = run(partial(FIT, weight=0.0), 2, cohorts=COHORTS)
    expected = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2, cohorts=COHORTS)
    assert_same(whole_state(got), whole_state(expected))
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].accuracy == score.accuracy
        assert got.test_scores[client].loss == pytest.approx(score.loss, abs=1e-6)


def test_one_neighbor_alone_is_the_nearest_one():
    data = Toy()
    federation = run(partial(FIT, weight=1.0, k=1), 1, data=data)
    for client in range(CLIENTS):
        model = own_model(federation, client)
        with torch.no_grad():
            known, asked = (model.encoder(data.tensors(client, part)[0]) for part in ("train", "test"))
        labels = [data.tensors(client, part)[1] for part in ("train", "test")]
        expected = nearest_neighbor_accuracy(known, labels[0], asked, labels[1])
        score = federation.test_scores[client]
        assert score.accuracy == pytest.approx(float(expected))
        assert math.isfinite(score.loss)


def test_training_never_sees_the_datastore():
    fit = partial(FIT, fine_tune="head", weight=0.0)
    got, expected = run(fit, 2), run(partial(FedAvg, lr=LR, epochs=EPOCHS, fine_tune="head"), 2)
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].loss == pytest.approx(score.loss, abs=1e-6)


def test_an_encoder_that_would_leave_the_stored_features_behind_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="fine_tune='all' would change before the evaluation: use fine_tune='"):
        FIT(tiny_encoder((6,)), CLASSES, fine_tune="all")
    federation = run(FIT, 1, limit_val_batches=0)
    for train in ("all", "linear+encoder"):
        with (
            pytest.raises(ConfigurationError, match=f"stored features.*{re.escape(train)}"),
            federation.personalized(Personalization(train)),
        ):
            federation.trainer.test(federation, federation.data, verbose=False)
    with pytest.warns(UserWarning, match="without the stored training samples"):
        export_clients(federation, tmp_path, [0])


def test_clients_that_never_train():
    data = Toy(novel_clients=2)
    federation = run(FIT, 1, data=data, loop=FederatedLoop())
    for client in data.novel:
        assert torch.equal(own_model(federation, client).datastore.as_state()["labels"], data.tensors(client)[1])


def test_clients_that_store_fewer_than_k_are_told_of_once():
    sizes = [len(labels) for labels in Toy().labels]
    least = sizes.index(min(sizes))
    for options, stored in (({"k": 1000}, sizes), ({"k": 9, "capacity": 0.25}, [round(0.25 * n) for n in sizes])):
        few = sum(number < options["k"] for number in stored)
        expected = f"{few} of {CLIENTS} clients store fewer than k = {options['k']} samples (client {least}: "
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run(partial(FIT, **options), 2)
        told = [str(warning.message) for warning in said if "KNNPer" in str(warning.message)]
        assert len(told) == 1
        assert f"{expected}{stored[least]}), so all their samples count" in told[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="KNNPer")
        run(partial(FIT, k=min(sizes)), 1)


def test_a_share_of_the_samples_is_stored():
    data = Toy()
    federation = run(partial(FIT, capacity=0.5), 1, data=data)
    model = own_model(federation, 1)
    store = {name: tensor.clone() for name, tensor in model.datastore.as_state().items()}
    assert store["features"].shape == (8, FEATURES)  # of 17
    assert torch.equal(own_model(federation, 1).datastore.as_state()["labels"], store["labels"])
    with torch.no_grad():
        known = model.encoder(data.tensors(1)[0])
    assert all(any(torch.allclose(row, other) for other in known) for row in store["features"])


def test_engines_agree_whatever_the_parts():
    engine = VectorizedEngine(forward="vmap")
    options = {"data": Toy(batch_size=9, **PARTS), "encoder": normed_encoder, "cohorts": COHORTS}
    got, expected = (run(FIT, 2, engine=e, **options) for e in (engine, SequentialEngine()))
    assert_same(whole_state(got), whole_state(expected), atol=1e-5)
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].loss == pytest.approx(score.loss, abs=1e-3)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_lambda_is_chosen_in_mixed_precision(engine):
    federation = run(FIT, 2, engine=engine(), precision="bf16-mixed", data=Toy(batch_size=9, **PARTS))
    exact = run(FIT, 2, data=Toy(batch_size=9, **PARTS))
    for client, score in exact.test_scores.items():
        assert federation.test_scores[client].loss == pytest.approx(score.loss, abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"weight": 1.5}, "weight .lambda. must be between 0 and 1, got 1.5"),
        ({"capacity": 0.0}, "capacity"),
        ({"scale": 0.0}, "scale"),
        ({"distance": "cosine"}, "distance"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        run(partial(FIT, **options))


@pytest.mark.parametrize("rows", [1, 11], ids=["one", "all"])
def test_samples_whose_features_are_not_finite_are_not_stored(rows):
    def broken(inputs, labels):
        inputs[:rows] = math.nan

    fit = {"data": Toy(change=broken), "cohorts": [range(1, CLIENTS)]}
    got, plain = (run(partial(method, lr=0.05), 2, **fit) for method in (partial(KNNPer, k=3, weight=0.5), FedAvg))
    score = got.test_scores[0]
    assert math.isfinite(score.loss)
    assert (score.loss == pytest.approx(plain.test_scores[0].loss)) == (rows == 11)
