"""Ditto against a plain restatement."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, score, sgd
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, run, tiny_encoder

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.methods import Ditto, FedAvg, LocalOnly

LR, EPOCHS, LAM = 0.05, 2, 0.4
COHORTS = [[0, 2, 3], [1, 2]]


def restate(personal_epochs=EPOCHS, personal_lr=LR):
    """w by FedAvg; v_k by SGD on F_k(v) + lambda / 2 ||v - w^t||^2, w^t as it was received."""
    data, shared, personal = Toy(), first_net(), [first_net() for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        uploads = []
        for client in cohort:
            received = named(shared)

            def held(net, inputs, labels, received=received):
                squares = [((p - received[name]) ** 2).sum() for name, p in net.named_parameters()]
                return cross_entropy(net, inputs, labels) + LAM / 2 * sum(squares)

            own, local = personal[client], copy_of(shared)
            steps = batches(data, client, round, "fit/0", personal_epochs)
            sgd(own, steps, list(own.parameters()), personal_lr, held)
            sgd(local, batches(data, client, round, "fit/1", EPOCHS), list(local.parameters()), LR)
            uploads.append(named(local))
        put(shared, mean_of(uploads, [len(data.labels[k]) for k in cohort]))
    return shared, personal


def own_part(model):
    return {name: p for name, p in named(model).items() if not name.startswith("global_model.")}


@pytest.mark.parametrize("options", [{}, {"personal_epochs": 3, "personal_lr": 0.1}], ids=["alike", "of its own"])
def test_rounds_equal_the_restatement(options):
    federation = run(partial(Ditto, lr=LR, epochs=EPOCHS, lam=LAM, **options), 2, cohorts=COHORTS)
    shared, personal = restate(**options)
    sent = {name.removeprefix("global_model."): t for name, t in federation.server.weights.as_state().items()}
    assert_same(sent, named(shared), atol=1e-6)
    for client, model in enumerate(personal):
        assert_same(own_part(federation.client_model(client)), named(model), atol=1e-6)
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(model, Toy(), client, "test"), abs=1e-5)


def test_the_global_model_is_that_of_fedavg():
    """What a client uploads does not depend on its personal model; the phases differ in their number alone."""
    whole = run(partial(Ditto, lr=LR, epochs=1, lam=LAM), 1).server.weights.as_state()
    other = run(partial(Ditto, lr=LR, epochs=1, lam=5.0, personal_epochs=2), 1).server.weights.as_state()
    assert_same(whole, other)
    assert set(whole) == {f"global_model.{name}" for name in run(FedAvg, 1).server.weights.as_state()}


def test_without_lambda_the_personal_models_train_alone():
    ditto = run(partial(Ditto, lr=LR, epochs=1, lam=0.0), 2)
    alone = run(partial(LocalOnly, lr=LR, epochs=1), 2)
    for client in range(CLIENTS):
        assert_same(own_part(ditto.client_model(client)), named(alone.client_model(client)), atol=1e-7)


def test_a_large_lambda_holds_the_personal_models_at_the_global_one():
    """With lr * lambda = 1 and no momentum, a step takes v to w^t - lr * gradient, wherever it was."""
    sgd_alone = partial(torch.optim.SGD, lr=0.001)
    federation = run(partial(Ditto, optimizer=sgd_alone, lam=1000.0), 2)
    received = {n.removeprefix("global_model."): t for n, t in federation.server.weights.as_state().items()}
    for client in range(CLIENTS):
        distance = max(
            float((t - received[n]).abs().max()) for n, t in own_part(federation.client_model(client)).items()
        )
        assert distance < 0.02


@pytest.mark.parametrize("engine", [TrainerEngine, partial(VectorizedEngine, forward="vmap")])
def test_every_engine_gives_the_same(engine):
    federation = run(partial(Ditto, lr=LR, epochs=EPOCHS, lam=LAM), 2, cohorts=COHORTS, engine=engine())
    _, personal = restate()
    for client, model in enumerate(personal):
        assert_same(own_part(federation.client_model(client)), named(model), atol=1e-5)


def test_the_client_that_is_handed_out_predicts_with_its_personal_model():
    federation = run(partial(Ditto, lr=LR, lam=LAM), 1)
    model, inputs = federation.client_model(2), torch.randn(3, 6)
    expected = model.head(model.encoder(inputs))
    torch.testing.assert_close(model.train()(inputs), expected)
    torch.testing.assert_close(model.eval()(inputs), expected)


def test_batch_normalization_is_personal_in_the_personal_model():
    client = Ditto(normed_encoder((6,)), 5)
    assert {n for n in client.shared_names() if "running" in n} == {
        "global_model.encoder.1.running_mean",
        "global_model.encoder.1.running_var",
    }
    assert "encoder.1.running_mean" in client.personal_names()


@pytest.mark.parametrize(
    ("options", "message"), [({"lam": -1.0}, "lam"), ({"personal_epochs": 0}, "personal_epochs must be at least 1")]
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Ditto(tiny_encoder((6,)), 5, **options)
