"""Per-FedAvg against plain torch and closed forms."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, score
from _helpers.toy import (
    CLIENTS,
    Toy,
    assert_same,
    dropout_encoder,
    normed_encoder,
    own_model,
    run,
    tiny_encoder,
    whole_state,
)
from torch import nn

from pfl_lightning import Federation, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import hessian_product
from pfl_lightning.methods import FedAvg, PerFedAvg
from pfl_lightning.methods.per_fedavg import difference_product

ALPHA, BETA, DELTA, EPOCHS = 0.3, 0.1, 0.05, 2
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(PerFedAvg, alpha=ALPHA, lr=BETA, epochs=EPOCHS)
PARTS = {"FO": 2, "HF": 3, "exact": 2}


def outer_gradient(net, parts, order):
    """Gradients of a step, with respect to the net's parameters, by autograd alone."""
    params = list(net.parameters())

    def gradients(inputs, labels, create_graph=False):
        return torch.autograd.grad(cross_entropy(net, inputs, labels), params, create_graph=create_graph)

    inner, start = gradients(*parts[0]), named(net)
    put(net, {n: p - ALPHA * g for (n, p), g in zip(start.items(), inner, strict=True)})
    outer = gradients(*parts[1])
    put(net, start)
    if order == "FO":
        return outer
    if order == "exact":
        slope = sum((g * v).sum() for g, v in zip(gradients(*parts[0], create_graph=True), outer, strict=True))
        return [v - ALPHA * h for v, h in zip(outer, torch.autograd.grad(slope, params), strict=True)]
    both = []
    for step in (DELTA, -DELTA):
        put(net, {n: p + step * v for (n, p), v in zip(start.items(), outer, strict=True)})
        both.append(gradients(*parts[2]))
    put(net, start)
    return [v - ALPHA * (up - down) / (2 * DELTA) for v, up, down in zip(outer, *both, strict=True)]


def restate(order):
    """The global model after the rounds; batches that cannot be divided are left out."""
    data, net = Toy(), first_net()
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            local = copy_of(net)
            for batch in batches(data, client, round, "fit/0", EPOCHS):
                if len(batch[1]) < PARTS[order]:
                    continue
                parts = list(zip(*(tensor.tensor_split(PARTS[order]) for tensor in batch), strict=True))
                gradients = outer_gradient(local, parts, order)
                put(local, {n: p - BETA * g for (n, p), g in zip(named(local).items(), gradients, strict=True)})
            trained.append(named(local))
        put(net, mean_of(trained, [1] * len(cohort)))
    return net


def adapted(net, data, client, epochs=1):
    """The net after the adaptation to the client's training data."""
    own = copy_of(net)
    inputs, labels = data.tensors(client)
    for _ in range(epochs):
        gradients = torch.autograd.grad(cross_entropy(own, inputs, labels), list(own.parameters()))
        put(own, {n: p - ALPHA * g for (n, p), g in zip(named(own).items(), gradients, strict=True)})
    return own


@pytest.mark.parametrize("order", PARTS)
def test_rounds_equal_the_restatement(order):
    data = Toy()
    method = partial(METHOD, order=order, delta=DELTA, adapt_epochs=None)
    federation = run(method, 2, cohorts=COHORTS, data=data)
    expected = restate(order)
    assert_same(federation.server.weights.as_state(), named(expected), atol=1e-5 if order == "HF" else 1e-6)
    for client in range(CLIENTS):
        got = federation.test_scores[client]
        want = score(adapted(expected, data, client), data, client, "test")
        assert (got.accuracy, got.loss) == pytest.approx(want, abs=1e-4)


def test_the_orders_differ_and_with_alpha_zero_they_do_not():
    """Without an inner step Per-FedAvg is FedAvg on the second parts, and nothing is adapted."""
    options = {"cohorts": COHORTS, "data": Toy(batch_size=6), "limit_val_batches": 0}
    states = {
        alpha: [
            run(partial(METHOD, alpha=alpha, order=order, epochs=1), 1, **options).server.weights.as_state()
            for order in ("FO", "exact")
        ]
        for alpha in (0.0, ALPHA)
    }
    assert_same(*states[0.0])
    assert not torch.equal(*(state["head.weight"] for state in states[ALPHA]))

    class SecondParts(FedAvg):
        by_samples = False

        def training_step(self, batch, batch_idx):
            return super().training_step([tensor.tensor_split(2)[1] for tensor in batch], batch_idx)

    half = run(partial(SecondParts, lr=BETA, epochs=1, momentum=0.0, weight_decay=0.0), 1, **options)
    assert_same(half.server.weights.as_state(), states[0.0][0], atol=1e-7)
    assert PerFedAvg(tiny_encoder((6,)), 5, alpha=0.0).personalization_phases() == ()


class Quadratic(PerFedAvg):
    """f(w) = 1/2 (w - a)'A(w - a) in place of the network's loss, w the head's bias and a the mean of the inputs."""

    curve = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))

    def _loss_at(self, inputs, labels, params, *, own_buffers=False):
        away = params["head.bias"] - inputs.mean(0)
        return away @ self.curve @ away / 2 + 0 * sum(p.sum() for p in params.values())


@pytest.mark.parametrize("order", PARTS)
def test_a_step_on_a_quadratic_is_the_closed_form(order):
    """FO: A (w~ - a); otherwise (I - alpha A) A (w~ - a), since A is the Hessian on all data."""
    encoder = nn.Linear(5, 5)
    encoder.out_features = 5
    client = Quadratic(encoder, 5, alpha=0.05, order=order).double()
    client.phase = client.phases()[0]
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = inputs.tensor_split(PARTS[order])
    client.training_step((inputs, torch.zeros(6, dtype=torch.int64)), 0)["loss"].backward()
    w, curve = client.head.bias.detach(), client.curve
    step = w - 0.05 * curve @ (w - parts[0].mean(0))
    expected = curve @ (step - parts[1].mean(0))
    if order != "FO":
        expected = expected - 0.05 * curve @ expected
    torch.testing.assert_close(client.head.bias.grad, expected)


def test_the_difference_of_gradients_is_the_hessians_product():
    """HF on D'' = D is "exact", to the precision of the difference."""
    client = PerFedAvg(normed_encoder((6,)), 5).double()
    inputs, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 5
    own = {name: p.detach() for name, p in client.network_parameters().items()}
    vector = {name: torch.randn_like(p) for name, p in own.items()}
    objective = partial(client._loss_at, inputs, labels)
    got, expected = difference_product(objective, own, vector, 1e-5), hessian_product(objective, own, vector)
    assert_same(got, expected, atol=1e-6)


@pytest.mark.parametrize("order", PARTS)
@pytest.mark.parametrize("engine", [TrainerEngine, partial(VectorizedEngine, forward="vmap")])
def test_every_engine_gives_the_same_with_batch_normalization(engine, order):
    method = partial(METHOD, order=order, epochs=1)
    options = {"encoder": normed_encoder, "precision": "64-true", "limit_val_batches": 0}
    got, expected = (run(method, 1, engine=made, data=Toy(batch_size=7), **options) for made in (engine(), None))
    assert_same(whole_state(got), whole_state(expected), atol=1e-9)
    assert int(own_model(got, 3).encoder[1].num_batches_tracked) > 0


def test_small_batches_are_left_out_and_small_clients_refused():
    """17 samples in batches of 4 leave one, which has no D'; three parts of two samples do not fit in 4."""
    steps = []

    class Counting(PerFedAvg):
        def make_update(self, context, before):
            steps.append(context.num_steps)
            return super().make_update(context, before)

    run(partial(Counting, epochs=1), 1, cohorts=[[1, 2]], limit_val_batches=0)
    assert steps == [4, 4]
    with pytest.raises(ConfigurationError, match=r"at least 2 samples; client 1 has 1"):
        run(METHOD, 1, data=Toy([[0, 1, 2], [1]]))
    with pytest.raises(ConfigurationError, match=r"takes at least 2 samples, and batch_size is 1; make it larger"):
        run(METHOD, 1, data=Toy(batch_size=1))
    with pytest.raises(ConfigurationError, match=r"takes at least 6 samples, and batch_size is 4; make it larger"):
        run(partial(METHOD, order="HF"), 1, encoder=normed_encoder)


def test_a_difference_of_gradients_takes_neither_dropout_nor_half_precision():
    with pytest.raises(ConfigurationError, match=r'dropout in the encoder .* use order="exact" or "FO"'):
        PerFedAvg(dropout_encoder((6,)), 5, order="HF")
    PerFedAvg(dropout_encoder((6,)), 5, order="exact")
    with pytest.raises(ConfigurationError, match="precision='bf16-mixed' rounds it away: use order"):
        run(partial(METHOD, order="HF"), 1, precision="bf16-mixed")


def test_what_adapts_before_an_evaluation():
    client = PerFedAvg(tiny_encoder((6,)), 5, alpha=ALPHA)
    [phase] = client.personalization_phases()
    assert (phase.train, phase.epochs, phase.plain, phase.batch_size) == (("*",), 1, True, None)
    sgd = phase.optimizer(client.parameters())
    assert (sgd.defaults["lr"], sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (ALPHA, 0, 0)
    assert phase == client.personalization_phases()[0]  # so that clients are adapted together
    [phase] = PerFedAvg(tiny_encoder((6,)), 5, fine_tune="head").personalization_phases()
    assert phase.train == ("head.*",)


def test_a_novel_client_adapts_the_global_model():
    federation = run(METHOD, 1, data=Toy(novel_clients=2), cohorts=[range(3)])
    assert isinstance(federation, Federation)
    novel, shared = federation.data.novel[0], first_net()
    put(shared, federation.server.weights.as_state())
    assert_same(named(own_model(federation, novel)), named(shared))
    assert not torch.equal(federation.client_model(novel).head.bias, shared.head.bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"order": "second"}, "order must be one of"),
        ({"delta": 0.0}, "delta must be a finite number above 0"),
        ({"adapt_epochs": 0}, "adapt_epochs must be at least 1"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PerFedAvg(tiny_encoder((6,)), 5, **options)
