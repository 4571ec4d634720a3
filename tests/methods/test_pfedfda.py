"""pFedFDA (McLaughlin and Su 2024) against plain torch: Gaussian classifiers, global in training and mixed after it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, mean_of, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    run,
    tiny_encoder,
)
from torch.nn import functional as F

from pfl_lightning import VectorizedEngine
from pfl_lightning.methods import PFedFDA
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, EPS, RIDGE = 2, 0.05, 1e-2, 0.1
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(PFedFDA, lr=LR, epochs=EPOCHS, eps=EPS, ridge=RIDGE)


def first():
    """The network and the first Gaussians."""
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    return Net(), (torch.rand(CLASSES, FEATURES).double(), torch.eye(FEATURES).double())


def shares(labels):
    priors = torch.bincount(labels, minlength=CLASSES).double() / len(labels) + EPS
    return priors / priors.sum()


def discriminant(gaussians, priors):
    """Bayes rule, class by class."""
    means, covariance = gaussians
    sigma = (1 - EPS) * covariance + EPS * covariance.diagonal().mean() * torch.eye(FEATURES).double()
    inverse = torch.linalg.inv(sigma)
    weights = torch.stack([inverse @ mean for mean in means])
    return weights, torch.stack([priors[c].log() - means[c] @ inverse @ means[c] / 2 for c in range(CLASSES)])


def estimate(features, labels, received, least=2):
    """Own means of classes with more samples than folds; the spread around them."""
    means = [
        features[labels == c].mean(dim=0) if int((labels == c).sum()) > least else received[0][c]
        for c in range(CLASSES)
    ]
    spread = sum(torch.outer(f - means[int(y)], f - means[int(y)]) for f, y in zip(features, labels, strict=True))
    return torch.stack(means), spread / (len(labels) - 1) + RIDGE * torch.eye(FEATURES).double()


def adapted(encoder, data, client, received, beta):
    inputs, labels = data.tensors(client)
    with torch.no_grad():
        own = estimate(encoder(inputs).double(), labels, received)
    return tuple(beta * mine + (1 - beta) * other for mine, other in zip(own, received, strict=True))


def with_head(net, gaussians, labels):
    weights, biases = discriminant(gaussians, shares(labels))
    put(net, {"head.weight": weights.float(), "head.bias": biases.float()})
    return net


@pytest.mark.parametrize(("betas", "beta"), [("global", 0.0), ("own", 1.0)])
def test_rounds_and_evaluations_equal_the_restatement(betas, beta):
    data = Toy(novel_clients=1)
    cohorts = [[data.participating[place] for place in cohort] for cohort in ([0, 2], [1, 2])]
    federation = run(partial(METHOD, betas=betas), 2, cohorts=[[0, 2], [1, 2]], data=data)
    net, gaussians = first()
    for round, cohort in enumerate(cohorts):
        encoders, mixed = [], []
        for client in cohort:
            local = with_head(copy_of(net), gaussians, data.tensors(client)[1])
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.encoder.parameters()), LR)
            encoders.append(named(local, "encoder."))
            mixed.append(dict(enumerate(adapted(local.encoder, data, client, gaussians, beta))))
        sizes = [len(data.labels[client]) for client in cohort]
        put(net, mean_of(encoders, sizes))
        gaussians = tuple(mean_of(mixed, sizes).values())
    got = federation.server.gaussians.as_state()
    torch.testing.assert_close(got["means"].double(), gaussians[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(got["covariance"].double(), gaussians[1], rtol=0, atol=1e-4)
    for client in (*data.participating[:2], data.novel[0]):
        own = with_head(copy_of(net), adapted(net.encoder, data, client, gaussians, beta), data.tensors(client)[1])
        assert_same(named(federation.client_model(client), "encoder."), named(own, "encoder."), atol=1e-5)
        inputs, _ = data.tensors(client, "test")
        with torch.no_grad():
            torch.testing.assert_close(federation.client_model(client)(inputs), own(inputs), rtol=1e-3, atol=1e-2)


def test_beta_zero_is_the_discriminant_of_pooled_statistics():
    """The own samples choose the class shares alone."""
    federation = run(partial(METHOD, betas="global"), 2, cohorts=COHORTS)
    got = federation.server.gaussians.as_state()
    pooled = (got["means"].double(), got["covariance"].double())
    for client in range(CLIENTS):
        weights, biases = discriminant(pooled, shares(Toy().tensors(client)[1]))
        head = federation.client_model(client).head
        torch.testing.assert_close(head.weight.detach().double(), weights, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.bias.detach().double(), biases, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("betas", ["one", "two"])
def test_the_betas_are_the_best_of_a_grid(betas):
    data = Toy()
    federation = run(partial(METHOD, betas=betas), 1, cohorts=[[0, 2]], data=data, limit_val_batches=0)
    client = federation.models[0]
    inputs, labels = data.tensors(1)
    with torch.no_grad():
        features = client.encoder(inputs).double()
    received, priors = client._global(), shares(labels)
    torch.manual_seed(3)
    found = client._find_betas(features, labels, received, priors)
    torch.manual_seed(3)
    fold = client._draw_folds(labels)
    for c in labels.unique():
        sizes = torch.bincount(fold[labels == c])
        assert int(sizes.max() - sizes.min()) <= 1

    def loss(*beta):
        total = 0.0
        for k in (0, 1):
            own = estimate(features[fold != k], labels[fold != k], (received.means, received.covariance))
            mixed = (
                beta[0] * own[0] + (1 - beta[0]) * received.means,
                beta[-1] * own[1] + (1 - beta[-1]) * received.covariance,
            )
            weights, biases = discriminant(mixed, priors)
            total += float(F.cross_entropy(features[fold == k] @ weights.T + biases, labels[fold == k]))
        return total

    grid = [step / 10 for step in range(11)]
    pairs = [(b,) for b in grid] if betas == "one" else [(a, b) for a in grid for b in grid]
    assert loss(*found.tolist()) <= min(loss(*pair) for pair in pairs) + 1e-2


class Alternating(PFedFDA):
    """Samples of each class are in the folds in turn, not at random."""

    def _draw_folds(self, labels):
        return torch.tensor([int((labels[:place] == label).sum()) % 2 for place, label in enumerate(labels)])


def searched(features, labels, received):
    """The beta of a fine grid with the least cross entropy on the fold that was left out."""
    fold, priors = Alternating._draw_folds(None, labels), shares(labels)
    own = [estimate(features[fold != k], labels[fold != k], received) for k in (0, 1)]

    def loss(beta):
        total = 0.0
        for k in (0, 1):
            mixed = tuple(beta * mine + (1 - beta) * other for mine, other in zip(own[k], received, strict=True))
            weights, biases = discriminant(mixed, priors)
            total += float(F.cross_entropy(features[fold == k] @ weights.T + biases, labels[fold == k]))
        return total

    return min((step / 100 for step in range(101)), key=loss)


def test_a_round_with_a_searched_beta_equals_the_restatement():
    data, mixed, found = Toy(), [], []
    method = partial(Alternating, lr=LR, epochs=EPOCHS, eps=EPS, ridge=RIDGE, betas="one")
    federation = run(method, 1, cohorts=[[0, 2]], data=data, limit_val_batches=0)
    net, gaussians = first()
    for client in (0, 2):
        labels = data.tensors(client)[1]
        local = with_head(copy_of(net), gaussians, labels)
        sgd(local, batches(data, client, 0, "fit/0", EPOCHS), list(local.encoder.parameters()), LR)
        with torch.no_grad():
            features = local.encoder(data.tensors(client)[0]).double()
        found.append(searched(features, labels, gaussians))
        mixed.append(dict(enumerate(adapted(local.encoder, data, client, gaussians, found[-1]))))
    expected = mean_of(mixed, [len(data.labels[client]) for client in (0, 2)])
    got = federation.server.gaussians.as_state()
    torch.testing.assert_close(got["means"].double(), expected[0], rtol=0, atol=1e-2)
    torch.testing.assert_close(got["covariance"].double(), expected[1], rtol=0, atol=1e-2)
    assert max(found) > 0.1


def test_too_few_samples_take_the_global_gaussians():
    client = PFedFDA(tiny_encoder((INPUTS,)), CLASSES)
    found = client._find_betas(torch.randn(3, FEATURES).double(), torch.tensor([0, 1, 2]), client._global(), None)
    assert found.tolist() == [0.0]


def test_a_feature_that_hardly_varies_gets_no_large_weight():
    """Its weight is at most its mean over the ridge; nearly without one it is beyond what a local fit bears."""
    features = torch.randn(60, FEATURES).double()
    features[:, 0] = 0.5 + 1e-5 * torch.randn(60)
    labels = torch.arange(60) % CLASSES
    largest = {}
    for ridge in (1.0, 1e-9):
        client = PFedFDA(tiny_encoder((INPUTS,)), CLASSES, ridge=ridge, eps=1e-9)
        own = client._estimate(features, labels, client._global())
        largest[ridge] = own.classifier(torch.full((CLASSES,), 1 / CLASSES).double(), client.eps)[0][:, 0].abs().max()
    assert largest[1.0] <= 0.5 / 1.0 + 0.1
    assert largest[1e-9] > 1e3


@pytest.mark.parametrize("engine", [None, VectorizedEngine])
def test_a_client_without_finite_features_is_evaluated_by_the_global_gaussians(engine):
    def spoil(inputs, labels):
        inputs[: len(Toy().labels[0])] = torch.nan  # of client 0, whose test samples are fine

    with pytest.warns(UserWarning, match="left out of the aggregation: .*client 0"):
        federation = run(METHOD, 1, data=Toy(change=spoil), engine=engine and engine())
    got = federation.server.gaussians.as_state()
    pooled = (got["means"].double(), got["covariance"].double())
    weights, _ = discriminant(pooled, shares(torch.tensor(Toy().labels[0])))
    torch.testing.assert_close(federation.client_model(0).head.weight.detach().double(), weights, rtol=1e-4, atol=1e-4)
    assert all(0 <= score.accuracy <= 1 for score in federation.test_scores.values())


def test_what_travels():
    loop = GivenCohorts([0, 3])
    run(METHOD, 1, loop=loop, limit_val_batches=0)
    encoder = 4 * sum(p.numel() for p in tiny_encoder((INPUTS,)).parameters())
    gaussians = 4 * (CLASSES * FEATURES + FEATURES * FEATURES)
    assert loop.traffic.up == loop.traffic.down == {"weights": 2 * encoder, "statistics": 2 * gaussians}
    assert PFedFDA(tiny_encoder((INPUTS,)), CLASSES).personal_names() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps must be a finite number above 0"),
        ({"ridge": 0.0}, "ridge must be a finite number above 0"),
        ({"folds": 1}, "folds must be at least 2"),
        ({"betas": "both"}, "betas must be one of"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PFedFDA(tiny_encoder((INPUTS,)), CLASSES, **options)


@pytest.mark.parametrize(
    "change",
    [lambda own: -own, lambda own: own + torch.ones_like(own).triu(1), lambda own: own * 0],
    ids=["negative", "not symmetric", "zero"],
)
def test_a_covariance_that_is_none_is_left_out(change):
    """Client 2 lies; the others' Gaussians are averaged without it."""

    class Lying(PFedFDA):
        def make_update(self, context, before):
            update = super().make_update(context, before)
            return replace(update, covariance=change(update.covariance)) if context.client == 2 else update

    with pytest.warns(UserWarning, match=r"client 2, round 1: PFedFDAUpdate.covariance is .*expected a"):
        lied = run(Lying, cohorts=[[0, 1, 2]])
    honest = run(PFedFDA, cohorts=[[0, 1]])
    assert_same(lied.server.gaussians.as_state(), honest.server.gaussians.as_state(), atol=0)
