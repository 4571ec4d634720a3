"""KT-pFL (Zhang et al. 2021) against plain torch: one client, one coefficient at a time."""

from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, first_net, named, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    PUBLIC,
    SEED,
    Toy,
    assert_same,
    linear_encoder,
    run,
    tiny_encoder,
)
from torch.nn import functional as F

from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.methods import FedMD, KTpFL, LocalOnly
from pfl_lightning.methods._public import PublicUpdate
from pfl_lightning.methods.ktpfl import transfer_step
from pfl_lightning.seeding import derive_seed

LR, EPOCHS, SIZE, BATCH, HEAT, RHO, STEP = 0.05, 2, 8, 5, 3.0, 0.7, 2.0
COHORTS = [[0, 2, 3], [1, 2], [0, 4, 2]]
METHOD = partial(
    KTpFL,
    lr=LR,
    epochs=EPOCHS,
    public_samples=SIZE,
    public_batch_size=BATCH,
    temperature=HEAT,
    rho=RHO,
    server_lr=STEP,
)
WITH_WEIGHTS = partial(KTpFL, lr=LR, epochs=EPOCHS, rho=RHO, server_lr=STEP, weights=True)


def public(data, round):
    generator = torch.Generator().manual_seed(derive_seed(SEED, "public", round))
    return data.public_split.raw_inputs[torch.randperm(PUBLIC, generator=generator)[:SIZE]]


def learned(server):
    """All coefficients, (m, m)."""
    everybody = range(server.num_clients)
    return (server.coefficients(everybody, everybody) / server.num_clients).float()


def learn(c, cohort, said):
    """The coefficients of a cohort, by autograd on the two mean squared errors."""
    c = c.clone()
    own = {i: {j: c[i, j] / sum(c[i, k] for k in cohort) for j in cohort} for i in cohort}
    mass = {i: float(sum(c[i, k] for k in cohort)) for i in cohort}
    for i in cohort:
        row = torch.tensor([own[i][j] for j in cohort], dtype=torch.float64, requires_grad=True)
        mixed = sum(row[place] * said[j].double() for place, j in enumerate(cohort))
        loss = F.mse_loss(mixed, said[i].double()) + RHO * F.mse_loss(row, torch.full_like(row, 1 / len(cohort)))
        (gradient,) = torch.autograd.grad(loss, row)
        stepped = torch.softmax(5 * (row.detach() - STEP * gradient), 0)
        for place, j in enumerate(cohort):
            c[i, j] = stepped[place] * mass[i]
    return c


def mixture(c, client, cohort, said):
    total = sum(float(c[client, j]) for j in cohort)
    return sum(float(c[client, j]) / total * said[j].double() for j in cohort).float()


def restate(data, encoders):
    """Everybody's network and the coefficients, with probabilities of public samples."""
    first = []
    for index, make in enumerate(encoders):
        torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
        first.append(Net(make))
    nets = [copy_of(first[client % len(first)]) for client in range(CLIENTS)]
    c, before, said = torch.full((CLIENTS, CLIENTS), 1 / CLIENTS), [], {}
    for round, cohort in enumerate(COHORTS):
        now, epochs = {}, min(round + 1, EPOCHS)
        for client in cohort:
            net, phase = nets[client], 0
            if said:
                target, inputs, steps = mixture(c, client, before, said), public(data, round), []
                generator = torch.Generator().manual_seed(derive_seed(SEED, "fit/0", round, client))
                steps = [[inputs[p], target[p]] for p in torch.randperm(SIZE, generator=generator).split(BATCH)]

                def divergence(net, x, y):
                    return (y * (y.log() - (net(x) / HEAT).log_softmax(1))).sum(1).mean()

                sgd(net, steps, list(net.parameters()), LR, divergence)
                phase = 1
            sgd(net, batches(data, client, round, f"fit/{phase}", epochs), list(net.parameters()), LR)
            with torch.no_grad():
                now[client] = (net(public(data, round + 1)) / HEAT).softmax(1)
        c, before, said = learn(c, cohort, now), cohort, now
    return nets, c


@pytest.mark.parametrize("encoders", [[tiny_encoder], [tiny_encoder, linear_encoder]], ids=["one", "two"])
def test_rounds_equal_the_restatement(encoders):
    data = Toy()
    federation = run(METHOD, 3, cohorts=COHORTS, data=data, encoder=encoders)
    nets, coefficients = restate(data, encoders)
    for client, net in enumerate(nets):
        assert_same(named(federation.client_model(client)), named(net), atol=1e-5)
    assert_same({"c": learned(federation.server)}, {"c": coefficients}, atol=1e-6)
    assert not torch.allclose(coefficients, torch.full_like(coefficients, 1 / CLIENTS), atol=1e-3)


def test_in_double_precision_the_server_keeps_what_was_said_as_it_was_said():
    data = Toy()
    federation = run(METHOD, data=data, precision="64-true")
    said = federation.server.sent.get(0)["scores"]
    expected = (federation.client_model(0)(public(data, 1).double()) / HEAT).softmax(1)
    assert_same({"said": said}, {"said": expected.detach()}, atol=1e-14)


def test_rounds_with_weights_equal_the_restatement():
    data = Toy()
    federation = run(WITH_WEIGHTS, 3, cohorts=COHORTS, data=data)
    start = first_net()
    nets = {client: copy_of(start) for client in range(CLIENTS)}
    c, before, said = torch.full((CLIENTS, CLIENTS), 1 / CLIENTS), [], {}
    flat = torch.nn.utils.parameters_to_vector
    for round, cohort in enumerate(COHORTS):
        now = {}
        for client in cohort:
            net = copy_of(start)
            if said:
                mixed = mixture(c, client, before, {j: flat(net.parameters()) for j, net in said.items()})
                torch.nn.utils.vector_to_parameters(mixed.detach(), net.parameters())
            steps = batches(data, client, round, "fit/0", min(round + 1, EPOCHS))
            sgd(net, steps, list(net.parameters()), LR)
            now[client] = nets[client] = net
        c = learn(c, cohort, {j: flat(net.parameters()).detach() for j, net in now.items()})
        before, said = cohort, now
    for client, net in nets.items():
        assert_same(named(federation.client_model(client)), named(net), atol=1e-5)
    assert_same({"c": learned(federation.server)}, {"c": c}, atol=1e-6)


def test_without_digest_it_is_local_training_bit_by_bit():
    options = {"lr": LR, "epochs": EPOCHS}
    federation = run(partial(METHOD, digest_epochs=0, growing=False), 2, cohorts=COHORTS)
    local = run(partial(LocalOnly, **options), 2, cohorts=COHORTS)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), named(local.client_model(client)))


def update(client, scores, round=0):
    return PublicUpdate(client=client, round=round, num_samples=3, scores=scores)


def said_by(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, CLASSES, generator=generator).softmax(1) for _ in range(count)]


def test_with_coefficients_held_at_one_everybody_hears_itself():
    server = METHOD(tiny_encoder((6,)), CLASSES, server_lr=0.0, sharpness=None).configure_aggregator(3)
    server.learned.assign({**server.learned.as_state(), "clients": torch.arange(3), "factors": 3 * torch.eye(3)})
    said = said_by()
    for client, scores in enumerate(said):
        server.receive(update(client, scores))
    server.aggregate()
    for client, scores in enumerate(said):
        assert torch.equal(server.broadcast(client, 1).targets, scores)


class Alone(KTpFL):
    """Everybody hears itself, whatever is learned."""

    def configure_aggregator(self, num_clients):
        server = super().configure_aggregator(num_clients)
        known = {"clients": torch.arange(num_clients), "factors": num_clients * torch.eye(num_clients)}
        server.learned.assign({**server.learned.as_state(), **known})
        return server


def test_who_hears_itself_trains_alone():
    """There is no gradient in its own probabilities, and with one batch an epoch the order does not matter."""
    fit, options = {"lr": LR, "epochs": EPOCHS, "weight_decay": 0.0}, {"precision": "64-true"}
    heard = {"public_samples": SIZE, "public_batch_size": BATCH, "temperature": HEAT, "growing": False}
    still = {**heard, "server_lr": 0.0, "sharpness": None}
    alone, mixed, local = (
        run(partial(method, **fit), 3, data=Toy(batch_size=100), **options)
        for method in (partial(Alone, **still), partial(KTpFL, **still), LocalOnly)
    )
    for client in range(CLIENTS):
        expected = named(local.client_model(client))
        assert_same(named(alone.client_model(client)), expected, atol=1e-9)
        assert not torch.allclose(named(mixed.client_model(client))["head.weight"], expected["head.weight"], atol=1e-6)


def test_equal_coefficients_make_the_target_the_mean_as_in_fedmd():
    own = METHOD(tiny_encoder((6,)), CLASSES, server_lr=0.0).configure_aggregator(CLIENTS)
    other = FedMD(tiny_encoder((6,)), CLASSES, public_samples=SIZE).configure_aggregator(CLIENTS)
    for client, scores in enumerate(said_by()):
        own.receive(update(client, scores))
        other.receive(update(client, scores))
    own.aggregate()
    other.aggregate()
    for client in range(CLIENTS):  # those outside the cohort, too
        torch.testing.assert_close(own.broadcast(client, 1).targets, other.broadcast(client, 1).targets)


@pytest.mark.parametrize("sharpness", [5.0, None])
def test_the_step_is_that_of_autograd(sharpness):
    said = torch.stack(said_by(4)).flatten(1).double()
    shares = (
        torch.rand(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(1).requires_grad_()
    )
    loss = sum(((shares[i] @ said - said[i]) ** 2).mean() + 0.3 * ((shares[i] - 0.25) ** 2).mean() for i in range(4))
    (gradient,) = torch.autograd.grad(loss, shares)
    expected = shares.detach() - 0.8 * gradient
    expected = expected if sharpness is None else (sharpness * expected).softmax(1)
    got = transfer_step(shares.detach(), said @ said.T, said.shape[1], 0.8, 0.3, sharpness)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("method", [METHOD, WITH_WEIGHTS, partial(METHOD, sharpness=None, server_lr=100.0)])
def test_rows_stay_on_the_simplex_and_show_the_cohort(method):
    federation = run(method, 3, cohorts=COHORTS)
    c = learned(federation.server)
    torch.testing.assert_close(c.sum(1), torch.ones(CLIENTS))
    assert bool((c >= 0).all())
    assert not torch.allclose(c, torch.full_like(c, 1 / CLIENTS), atol=1e-3)
    weights = federation.server.aggregation_weights
    assert weights.clients == (0, 4, 2)
    torch.testing.assert_close(weights.weights.sum(1), torch.ones(3, dtype=torch.float64))


def test_coefficients_are_those_of_a_loop():
    server = METHOD(tiny_encoder((6,)), CLASSES).configure_aggregator(9)
    assert torch.equal(server.coefficients([2, 0], [1]), torch.ones(2, 1, dtype=torch.float64))
    known, factors = [5, 2, 7], torch.rand(3, 3, generator=torch.Generator().manual_seed(3))
    server.learned.assign({**server.learned.as_state(), "clients": torch.tensor(known), "factors": factors})
    for clients, others in (([2, 0, 5, 8], [7, 1, 2, 5, 3]), ([0], [5, 2]), ([5], [])):
        expected = torch.ones(len(clients), len(others), dtype=torch.float64)
        for row, i in enumerate(clients):
            for column, j in enumerate(others):
                if i in known and j in known:
                    expected[row, column] = factors[known.index(i), known.index(j)]
        assert torch.equal(server.coefficients(clients, others), expected)


def test_what_is_sent():
    client = METHOD(tiny_encoder((6,)), CLASSES)
    server = client.configure_aggregator(CLIENTS)
    assert server.broadcast(0, 0).num_bytes == 0
    server.receive(update(0, said_by()[0]))
    server.aggregate()
    assert server.broadcast(1, 1).num_bytes == 4 * SIZE * CLASSES
    assert server.broadcast(1, 2).targets is None  # of other samples
    heavy = WITH_WEIGHTS(tiny_encoder((6,)), CLASSES)
    size = sum(4 * p.numel() for p in heavy.parameters())
    assert heavy.configure_aggregator(CLIENTS).broadcast(0, 0).num_bytes == size
    assert heavy.public_samples == 0


def test_probabilities_where_weights_are_sent_are_refused():
    server = WITH_WEIGHTS(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    weights = server.broadcast(0, 0).weights
    sent = PublicUpdate(client=0, round=0, num_samples=3, weights=weights, scores=said_by()[0])
    with pytest.raises(InvalidMessageError, match=r"PublicUpdate\.scores is not expected"):
        server.check(sent)
    server = METHOD(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    with pytest.raises(InvalidMessageError, match=r"scores has shape \(8, 4\), expected \(8, 5\)"):
        server.check(update(0, torch.ones(SIZE, CLASSES - 1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be"),
        (
            {"weights": True, "public_samples": 8, "temperature": 2.0},
            "leave out public_samples, temperature, or",
        ),
        ({"rho": -1.0}, "rho must be"),
        ({"server_lr": -1.0}, "server_lr must be"),
        ({"sharpness": float("nan")}, "sharpness must be"),
        ({"distillation": -1.0}, "distillation must be"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KTpFL(tiny_encoder((6,)), CLASSES, **options)


def test_a_client_outside_every_cohort_keeps_its_first_weights():
    federation = run(METHOD, 1, cohorts=[[0, 1]])
    assert_same(named(federation.client_model(4)), named(first_net()))
