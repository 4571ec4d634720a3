"""FedTGP (Zhang et al. 2024) against plain torch."""

import math
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, cross_entropy, named, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    run,
    tiny_encoder,
    whole_state,
)
from torch import nn

from pfl_lightning.methods import FedProto, FedTGP
from pfl_lightning.methods._class_means import ClassMeansUpdate
from pfl_lightning.methods.fedproto import FedProtoAggregator
from pfl_lightning.methods.fedtgp import adaptive_margin
from pfl_lightning.seeding import derive_seed

LR, EPOCHS, ALIGNMENT, SERVER_LR, SERVER_EPOCHS, SERVER_BATCH = 0.05, 2, 3.0, 0.1, 4, 3
ONE, TWO = [tiny_encoder], [tiny_encoder, linear_encoder]
COHORTS = [[3, 0, 2], [1, 2]]
METHOD = partial(
    FedTGP,
    lr=LR,
    epochs=EPOCHS,
    alignment=ALIGNMENT,
    server_lr=SERVER_LR,
    server_epochs=SERVER_EPOCHS,
    server_batch_size=SERVER_BATCH,
)


class Prototypes:
    """The server's: its vectors, its two layers, and what it trains on."""

    def __init__(self):
        torch.manual_seed(derive_seed(SEED, "server"))
        self.vectors = nn.Embedding(CLASSES, FEATURES).weight
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.parameters = [self.vectors, *self.first.parameters(), *self.second.parameters()]

    def all(self):
        return self.second(self.first(self.vectors).clamp(min=0))

    def train(self, uploads, round, largest=100.0):
        pairs = [(mean, c) for means in uploads for c, mean in means.items()]
        centers = {}
        for c in {c for _, c in pairs}:
            own = [mean for mean, label in pairs if label == c]
            centers[c] = sum(own) / len(own)
        gaps = [min(float((m - other).norm()) for d, other in centers.items() if d != c) for c, m in centers.items()]
        margin = min(max(gaps), largest)
        generator = torch.Generator().manual_seed(derive_seed(SEED, "server batches", round))
        for _ in range(SERVER_EPOCHS):
            order = torch.randperm(len(pairs), generator=generator).tolist()
            for start in range(0, len(order), SERVER_BATCH):
                chosen = [pairs[place] for place in order[start : start + SERVER_BATCH]]
                loss = sum(self.loss(mean, c, margin) for mean, c in chosen) / len(chosen)
                for p, g in zip(self.parameters, torch.autograd.grad(loss, self.parameters), strict=True):
                    p.data -= SERVER_LR * g

    def loss(self, mean, c, margin):
        distances = [(mean - prototype).norm() for prototype in self.all()]
        distances[c] = distances[c] + margin
        return distances[c] + torch.logsumexp(-torch.stack(distances), 0)


def restate(cohorts, encoders):
    """Every client's network, and the global prototypes."""
    data, server, nets = Toy(), Prototypes(), []
    for index, make in enumerate(encoders):
        torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
        nets.append(Net(make))
    nets = [copy_of(nets[client % len(nets)]) for client in range(CLIENTS)]
    for round, cohort in enumerate(cohorts):
        received, uploads = server.all().detach() if round else None, []

        def loss(net, inputs, labels, received=received):
            if received is None:
                return cross_entropy(net, inputs, labels)
            pull = (net.encoder(inputs) - received[labels]).square().mean()
            return cross_entropy(net, inputs, labels) + ALIGNMENT * pull

        for client in cohort:
            net = nets[client]
            sgd(net, batches(data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR, loss)
            inputs, labels = data.tensors(client)
            with torch.no_grad():
                features = net.encoder(inputs)
            uploads.append({c: features[labels == c].mean(0) for c in sorted(set(labels.tolist()))})
        server.train(uploads, round)
    return nets, server.all().detach()


@pytest.mark.parametrize("encoders", [ONE, TWO], ids=["one encoder", "two encoders"])
@pytest.mark.parametrize("cohorts", [COHORTS[:1], COHORTS], ids=["one round", "two rounds"])
def test_rounds_equal_the_restatement(cohorts, encoders):
    federation = run(METHOD, len(cohorts), cohorts=cohorts, encoder=encoders)
    nets, prototypes = restate(cohorts, encoders)
    sent = federation.server.broadcast(0, 9)
    assert sent.classes.tolist() == list(range(CLASSES))
    torch.testing.assert_close(sent.means, prototypes, rtol=0, atol=1e-5)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), named(nets[client]), atol=1e-5)
    inputs, labels = Toy().tensors(3, "test")
    with torch.no_grad():
        nearest = torch.cdist(nets[3].encoder(inputs), prototypes).argmin(1)
    assert federation.test_scores[3].accuracy == pytest.approx(float((nearest == labels).float().mean()))


def test_with_prototypes_set_to_the_means_it_is_fedproto():
    class Means(FedTGP):
        def configure_aggregator(self, num_clients):
            return FedProtoAggregator(self, num_clients)

    options = {"lr": LR, "epochs": 1, "alignment": 0.7}
    found = [run(partial(method, **options), 2, cohorts=COHORTS, encoder=TWO) for method in (Means, FedProto)]
    assert_same(*map(whole_state, found))
    assert found[0].test_scores == found[1].test_scores


def upload(means, classes, client=0, round=0):
    counts = torch.ones(len(classes), dtype=torch.int64)
    return ClassMeansUpdate(
        client=client, round=round, num_samples=9, means=means, classes=torch.tensor(classes), counts=counts
    )


def server_of(**options):
    torch.manual_seed(0)
    return FedTGP(tiny_encoder((6,)), CLASSES, **options).configure_aggregator(CLIENTS)


def test_prototypes_come_near_the_uploaded_and_apart():
    """With a margin they are farther apart than the clients' own, without it they are not."""
    means = torch.eye(4)[:3] * 2
    distances = []
    for largest in (0.0, 100.0):
        server = server_of(server_lr=0.1, server_epochs=300, max_margin=largest)
        for client in range(3):
            server.receive(upload(means, [0, 1, 2], client))
        server.aggregate()
        sent = server.broadcast(0, 1).means[:3]
        assert torch.cdist(means, sent).argmin(1).tolist() == [0, 1, 2]
        distances.append(float(torch.pdist(sent).min()))
    assert distances[1] > distances[0]
    assert distances[1] > float(torch.pdist(means).min())


def test_the_margin():
    points = torch.tensor([[0.0], [2.0], [4.0], [9.0]])
    assert adaptive_margin(points, torch.tensor([3, 3, 1, 0]), 100.0) == 5.0
    assert adaptive_margin(points, torch.tensor([3, 3, 1, 0]), 4.5) == 4.5
    assert adaptive_margin(points, torch.zeros(4, dtype=torch.int64), 100.0) == 100.0
    assert adaptive_margin(points.repeat(2, 1)[:2] * 0, torch.tensor([0, 1]), 100.0) == 0.0


def test_nothing_is_sent_before_training_and_all_classes_after():
    server = server_of(server_epochs=1)
    assert server.broadcast(0, 0).means.shape == (0, FEATURES)
    server.receive(upload(torch.zeros(1, FEATURES), [2]))  # a distance of 0 has a gradient
    assert server.broadcast(1, 0).means.shape == (0, FEATURES)
    server.aggregate()
    first = server.broadcast(0, 1).means
    assert first.shape == (CLASSES, FEATURES)
    assert bool(first.isfinite().all())
    assert not first.requires_grad
    server.aggregate()
    assert torch.equal(server.broadcast(0, 1).means, first)


def test_prototypes_alone_travel():
    loop = GivenCohorts([0, 3], [1, 2])
    run(partial(METHOD, epochs=1), 2, loop=loop, encoder=TWO, limit_val_batches=0)
    held = [len({*Toy().labels[client]}) for client in (0, 3, 1, 2)]
    assert loop.traffic.up == {"statistics": sum(k * (FEATURES * 4 + 8 + 8) for k in held)}
    assert loop.traffic.down == {"statistics": 2 * CLASSES * (FEATURES * 4 + 8)}


def test_a_non_finite_result_is_taken_back():
    server = server_of(server_lr=1e38, server_epochs=2)
    server.receive(upload(torch.eye(FEATURES)[:2] * 1e10, [0, 1], round=4))
    with pytest.warns(UserWarning, match="round 5: the server's network is kept as it was, .* lower server_lr"):
        server.aggregate()
    assert all(math.isfinite(float(p.detach().sum())) for p in server.learner.network.parameters())
    assert server.broadcast(0, 5).means.shape == (0, FEATURES)  # nothing was trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, "server_lr must be"),
        ({"server_epochs": 0}, "server_epochs must be"),
        ({"server_batch_size": 0}, "server_batch_size must be"),
        ({"max_margin": -1.0}, "max_margin must be"),
        ({"alignment": -1.0}, "alignment .lambda. must be"),
        ({"prediction": "head"}, "prediction must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedTGP(tiny_encoder((6,)), CLASSES, **options)
