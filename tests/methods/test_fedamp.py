"""FedAMP and HeurFedAMP (Huang et al. 2021) against plain torch."""

import math
from functools import partial

import pytest
import torch
from _helpers.plain import batches, cross_entropy, first_net, named, put, sgd
from _helpers.toy import CLASSES, CLIENTS, Toy, assert_same, linear_encoder, normed_encoder, run, tiny_encoder
from torch.nn import functional as F

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods import FedAMP, FedAvg, LocalOnly
from pfl_lightning.methods.fedamp import cosine_attention, gaussian_attention
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.image import Snapshot

LR, EPOCHS, PROXIMAL = 0.05, 2, 0.7
COHORTS = [[3, 0, 2], [1, 2], [0, 3]]
COSINE = {"attention": "cosine", "sigma": 3.0, "own_share": 0.4}
GAUSSIAN = {"attention": "gaussian", "sigma": 2.0, "step": 1.5}
METHOD = partial(FedAMP, lr=LR, epochs=EPOCHS, proximal=PROXIMAL)


def vector(state):
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def attention(models, options):
    """xi in loops."""
    rows = [vector(model) for model in models]
    found = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, own in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        if options["attention"] == "cosine":
            scores = [math.exp(options["sigma"] * float(F.cosine_similarity(own, rows[j], dim=0))) for j in others]
            share = options["own_share"]
            values = [(1 - share) * score / sum(scores) for score in scores]
        else:
            sigma = options["sigma"]
            values = [
                options["step"] / sigma * math.exp(-float((own - rows[j]).square().sum()) / sigma) for j in others
            ]
            values = [value / max(1.0, sum(values)) for value in values]
        for j, value in zip(others, values, strict=True):
            found[i, j] = value
        found[i, i] = 1 - sum(values)
    return found


def pulled(mixture):
    """F(w) + lambda / (2 alpha) ||w - u||^2."""

    def loss(net, inputs, labels):
        distance = sum((p - mixture[name]).square().sum() for name, p in net.named_parameters())
        return cross_entropy(net, inputs, labels) + PROXIMAL / 2 * distance

    return loss


def restate(cohorts, options, start_of_fit="own"):
    """Every client's own model and mixture."""
    data, start = Toy(), named(first_net())
    own, mixtures = [start] * CLIENTS, [start] * CLIENTS
    for round, cohort in enumerate(cohorts):
        for client in cohort:
            net = first_net()
            put(net, own[client] if start_of_fit == "own" else mixtures[client])
            steps = batches(data, client, round, "fit/0", EPOCHS)
            sgd(net, steps, list(net.parameters()), LR, pulled(mixtures[client]))
            own[client] = named(net)
        weights = attention([own[client] for client in cohort], options)
        for row, client in zip(weights, cohort, strict=True):
            mixtures[client] = {
                name: sum(w * own[k][name].double() for w, k in zip(row, cohort, strict=True)).float() for name in start
            }
    return own, mixtures


@pytest.mark.parametrize("cohorts", [COHORTS[:1], COHORTS], ids=["one round", "three rounds"])
@pytest.mark.parametrize("options", [COSINE, GAUSSIAN], ids=["cosine", "gaussian"])
@pytest.mark.parametrize("start", ["own", "mixture"])
def test_rounds_equal_the_restatement(cohorts, options, start):
    federation = run(partial(METHOD, start=start, **options), len(cohorts), cohorts=cohorts)
    own, mixtures = restate(cohorts, options, start)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), own[client], atol=1e-6)
        assert_same(dict(federation.server.broadcast(client, 9).weights), mixtures[client], atol=1e-6)
    last = federation.server.aggregation_weights
    assert last.clients == tuple(cohorts[-1])
    torch.testing.assert_close(last.weights.sum(1), torch.ones(len(cohorts[-1]), dtype=torch.float64))


def test_the_cases_are_not_trivial():
    for options in (COSINE, GAUSSIAN):
        own, mixtures = restate(COHORTS, options)
        assert not torch.allclose(own[0]["head.weight"], mixtures[0]["head.weight"], atol=1e-2)
    assert not torch.allclose(restate(COHORTS, COSINE)[0][0]["head.weight"], own[0]["head.weight"], atol=1e-4)


def test_without_the_pull_it_is_local_training():
    alone = run(partial(LocalOnly, lr=LR, epochs=EPOCHS), 3, cohorts=COHORTS)
    pulled = run(partial(METHOD, proximal=0.0), 3, cohorts=COHORTS)
    for client in range(CLIENTS):
        assert_same(named(pulled.client_model(client)), named(alone.client_model(client)))


def test_from_plain_means_without_the_pull_it_is_fedavg_with_equal_weights():
    """With the same cohort in every round, so that all mixtures are the global model."""
    cohort = [3, 0, 2]
    mixed = run(partial(METHOD, start="mixture", sigma=0.0, proximal=0.0), 3, cohorts=[cohort])
    plain = run(partial(EqualWeights, lr=LR, epochs=EPOCHS), 3, cohorts=[cohort])
    for client in cohort:
        got = dict(mixed.server.broadcast(client, 3).weights)
        assert_same(got, plain.server.weights.as_state(), atol=1e-6)
        assert_same(named(mixed.client_model(client)), named(plain.client_model(client)), atol=1e-6)


class EqualWeights(FedAvg):
    """FedAvg with the plain mean, whose clients are evaluated as their fit left them."""

    eval_model = "trained"

    def configure_aggregator(self, num_clients):
        return AveragingAggregator(self, num_clients, by_samples=False)


def test_with_sigma_0_every_mixture_is_the_plain_mean():
    federation = run(partial(METHOD, sigma=0.0), 1, cohorts=[[3, 0, 2]])
    models = [named(federation.client_model(client)) for client in (3, 0, 2)]
    mean = {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}
    for client in (3, 0, 2):
        assert_same(dict(federation.server.broadcast(client, 1).weights), mean, atol=1e-6)


@pytest.mark.parametrize("options", [COSINE, GAUSSIAN], ids=["cosine", "gaussian"])
def test_equal_clients_get_equal_mixtures(options):
    torch.manual_seed(0)
    server = FedAMP(tiny_encoder((6,)), CLASSES, **options).configure_aggregator(CLIENTS)
    start = server.broadcast(0, 0).weights
    models = [{name: tensor + shift for name, tensor in start.items()} for shift in (0.1, 0.1, -0.2)]
    for client, weights in enumerate(models):
        server.receive(ClientUpdate(client=client, round=0, num_samples=3, weights=weights))
    server.aggregate()
    one, same, other = (server.broadcast(client, 1).weights for client in range(3))
    assert_same(one, same, atol=1e-6)
    assert not torch.allclose(one["head.weight"], other["head.weight"], atol=1e-3)
    assert_same(server.broadcast(4, 1).weights, start)


def test_weights_are_never_negative():
    squares = torch.tensor([[0.0, 0.1, 0.2], [0.1, 0.0, 0.3], [0.2, 0.3, 0.0]], dtype=torch.float64)
    weights = gaussian_attention(squares, sigma=0.2, step=1.0)  # 1 / 0.2 exp(-0.5) is above 1
    assert bool((weights >= 0).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))
    assert weights.diagonal().tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)
    far = gaussian_attention(squares * 1e6, sigma=0.2, step=1.0)
    assert torch.equal(far, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("own_share", [None, 0.0, 0.3])
def test_rows_of_cosine_attention_add_up_to_one(own_share):
    models = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = cosine_attention(models @ models.T, 25.0, own_share)
    assert bool((weights >= 0).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64))
    assert weights.diagonal().tolist() == pytest.approx([1 / 6 if own_share is None else own_share] * 6)


def test_rounding_makes_no_weight_negative():
    """Others whose weights add up to 1 leave 0, and not what rounding takes below it."""
    for seed in range(200):
        points = torch.randn(3 + seed % 9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        weights = gaussian_attention(torch.cdist(points, points).square(), sigma=0.5 + seed % 7, step=50.0)
        assert float(weights.min()) >= 0
        torch.testing.assert_close(weights.sum(1), torch.ones(len(points), dtype=torch.float64))


def arrived(server, clients):
    """A server that has received models with some noise."""
    generator = torch.Generator().manual_seed(1)
    start = server.broadcast(0, 0).weights
    for client in range(clients):
        weights = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in start.items()}
        server.receive(ClientUpdate(client=client, round=0, num_samples=3, weights=weights))
    return server


def test_others_that_count_for_everything_are_aggregated():
    server = FedAMP(tiny_encoder((6,)), CLASSES, attention="gaussian", step=1e4).configure_aggregator(11)
    arrived(server, 11).aggregate()
    weights = server.aggregation_weights.weights
    assert weights.diagonal().tolist() == pytest.approx([0.0] * 11, abs=1e-12)
    assert float(weights.min()) >= 0
    assert all(bool(tensor.isfinite().all()) for tensor in server.broadcast(3, 1).weights.values())


def test_models_that_came_are_not_copied_by_a_snapshot():
    server = FedAMP(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    before = len(Snapshot(server)._tensors)
    assert len(Snapshot(arrived(server, 4))._tensors) == before


def test_a_cohort_of_one_keeps_its_model():
    one = torch.ones(1, 1, dtype=torch.float64)
    assert torch.equal(cosine_attention(4 * one, 1.0, 0.2), one)
    assert torch.equal(gaussian_attention(0 * one, 1.0, 1.0), one)
    assert torch.equal(cosine_attention(torch.zeros(2, 2), 1.0, None), torch.full((2, 2), 0.5))  # of nothing but zeros


def test_buffers_stay_on_the_client():
    federation = run(METHOD, 2, encoder=normed_encoder, data=Toy(batch_size=9))
    assert "encoder.1.weight" in federation.server.mixtures.initial
    assert "encoder.1.running_mean" not in federation.server.mixtures.initial
    means = [federation.client_model(client).state_dict()["encoder.1.running_mean"] for client in (0, 1)]
    assert not torch.equal(*means)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "dot"}, "attention must be one of"),
        ({"attention": "gaussian", "sigma": 0.0}, "sigma must be a finite number above 0"),
        ({"sigma": -1.0}, "sigma must be"),
        ({"step": -1.0}, "step .alpha. must be"),
        ({"own_share": 1.5}, "own_share must be between 0 and 1"),
        ({"attention": "gaussian", "own_share": 0.5}, "own_share is an option of attention='cosine'"),
        ({"step": 1.0}, "step .alpha. is an option of attention='gaussian'"),
        ({"eval_model": "aggregated"}, "eval_model of FedAMP must be one of"),
        ({"proximal": -1.0}, "proximal .lambda / alpha. must be"),
        ({"start": "mix"}, "start must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedAMP(tiny_encoder((6,)), CLASSES, **options)


def test_encoders_must_be_equal():
    with pytest.raises(ConfigurationError, match="FedAMP needs the same shapes"):
        run(METHOD, 1, encoder=[tiny_encoder, linear_encoder])
