"""pFedHN and pFedHN-PC (Shamsian et al. 2021) against plain torch."""

import itertools
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, first_net, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
)
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.learner import Learner
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods import FedAvg, PFedHN
from pfl_lightning.seeding import derive_seed
from pfl_lightning.state.image import Snapshot

LR, EPOCHS, SERVER_LR, CLIP = 0.05, 2, 0.2, 0.3
COHORTS = [[3, 0, 2], [1, 2], [0, 3]]
SMALL = {"hidden_size": 7, "hidden_layers": 2, "server_clip": CLIP, "server_lr": SERVER_LR}
METHOD = partial(PFedHN, lr=LR, epochs=EPOCHS, momentum=0.5, weight_decay=5e-4, **SMALL)


class Restated:
    """The hypernetwork in matrices, with its gradient by the chain rule written out."""

    def __init__(self, names):
        shapes = {name: p.shape for name, p in Net().named_parameters() if name.startswith(names)}
        torch.manual_seed(derive_seed(SEED, "server"))
        width, hidden = 1 + CLIENTS // 4, 7
        self.embeddings = nn.Embedding(CLIENTS, width).weight.data
        layers = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)]
        self.layers = [[layer.weight.data, layer.bias.data] for layer in layers]
        outputs = [nn.Linear(hidden, shape.numel()) for shape in shapes.values()]
        self.outputs = [[layer.weight.data, layer.bias.data] for layer in outputs]
        self.shapes = shapes
        self.velocity = [torch.zeros_like(tensor) for tensor in self.tensors()]

    def tensors(self):
        return [self.embeddings, *(t for pair in (*self.layers, *self.outputs) for t in pair)]

    def hidden(self, client):
        found = [self.embeddings[client]]
        for place, (weight, bias) in enumerate(self.layers):
            found.append(weight @ (found[-1].clamp(min=0) if place else found[-1]) + bias)
        return found

    def generate(self, client):
        last = self.hidden(client)[-1]
        own = zip(self.shapes.items(), self.outputs, strict=True)
        return {name: (weight @ last + bias).reshape(shape) for (name, shape), (weight, bias) in own}

    def gradient(self, client, change):
        """J^T change: back through the outputs, then through the hidden layers."""
        hidden = self.hidden(client)
        outputs = [change[name].flatten() for name in self.shapes]
        back = sum(weight.T @ change for (weight, _), change in zip(self.outputs, outputs, strict=True))
        layers = []
        for place in range(len(self.layers) - 1, -1, -1):
            entering = hidden[place].clamp(min=0) if place else hidden[place]
            layers = [torch.outer(back, entering), back, *layers]
            back = self.layers[place][0].T @ back
            if place:
                back = back * (hidden[place] > 0)
        embeddings = torch.zeros_like(self.embeddings)
        embeddings[client] = back
        return [embeddings, *layers, *(t for change in outputs for t in (torch.outer(change, hidden[-1]), change))]

    def step(self, gradients):
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for tensor, gradient, velocity in zip(self.tensors(), gradients, self.velocity, strict=True):
            velocity.mul_(0.9).add_(gradient * min(1.0, float(CLIP / norm)) + 1e-3 * tensor)
            tensor.sub_(SERVER_LR * velocity)


def difference(start, end):
    return {name: tensor - end[name] for name, tensor in start.items()}


def restate(cohorts, names=("encoder.", "head."), steps="client"):
    """The hypernetwork, and every client's network as it is evaluated."""
    data, server = Toy(), Restated(names)
    heads = [named(first_net()) for _ in range(CLIENTS)]
    for round, cohort in enumerate(cohorts):
        changes = []
        for client in cohort:
            net, sent = first_net(), server.generate(client)
            put(net, {**heads[client], **sent})
            sgd(net, batches(data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR)
            heads[client] = named(net)
            changes.append((client, sent))
        if steps == "round":
            parts = [server.gradient(client, difference(sent, heads[client])) for client, sent in changes]
            server.step([torch.stack(part).mean(0) for part in zip(*parts, strict=True)])
        else:
            for client, sent in changes:
                start = sent if steps == "sent" else server.generate(client)
                server.step(server.gradient(client, difference(start, heads[client])))
    return [{**heads[client], **server.generate(client)} for client in range(CLIENTS)]


@pytest.mark.parametrize("cohorts", [COHORTS[:1], COHORTS], ids=["one round", "three rounds"])
@pytest.mark.parametrize("server_steps", ["client", "sent", "round"])
def test_rounds_equal_the_restatement(cohorts, server_steps):
    federation = run(partial(METHOD, server_steps=server_steps), len(cohorts), cohorts=cohorts)
    expected = restate(cohorts, steps=server_steps)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), expected[client], atol=2e-6)


def test_with_a_personal_head_the_rest_is_generated():
    federation = run(partial(METHOD, personal_head=True), len(COHORTS), cohorts=COHORTS)
    expected = restate(COHORTS, names=("encoder.",))
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), expected[client], atol=2e-6)
    assert PFedHN(tiny_encoder((6,)), CLASSES).server_lr == 0.01
    assert PFedHN(tiny_encoder((6,)), CLASSES, personal_head=True).server_lr == 0.05


def test_the_three_ways_to_step_differ():
    found = [restate(COHORTS[:1], steps=steps)[0]["head.weight"] for steps in ("client", "sent", "round")]
    for one, other in itertools.combinations(found, 2):
        assert not torch.allclose(one, other, atol=1e-4)


def test_of_one_client_all_ways_to_step_are_the_published_one():
    found = [restate([[2]], steps=steps) for steps in ("client", "sent", "round")]
    for other in found[1:]:
        for client in range(CLIENTS):
            assert_same(other[client], found[0][client], atol=1e-6)


def server_of(client=None, clients=CLIENTS, **options):
    torch.manual_seed(0)
    client = client or PFedHN(tiny_encoder((6,)), CLASSES, **options)
    return client.configure_aggregator(clients)


def test_one_client_and_a_linear_hypernetwork_are_fedavg():
    """With e frozen and a rate of 1 / (|e|^2 + 1), a step leads exactly to the trained model."""
    server = server_of(clients=1, hidden_size=4, hidden_layers=0)
    network = server.learner.network
    for part in (network.embeddings, network.body):
        part.requires_grad_(False)
    features = network.body(network.embeddings.weight[0])
    rate = 1 / (float(features.square().sum()) + 1)
    server.learner = Learner(network, partial(torch.optim.SGD, lr=rate))
    sent = server.broadcast(0, 0).weights
    trained = {name: tensor + torch.randn(tensor.shape) for name, tensor in sent.items()}
    server.receive(ClientUpdate(client=0, round=0, num_samples=3, weights=trained))
    server.aggregate()
    assert_same(server.broadcast(0, 1).weights, trained, atol=1e-5)


def test_equal_embeddings_give_equal_models():
    server = server_of()
    with torch.no_grad():
        server.learner.network.embeddings.weight[2] = server.learner.network.embeddings.weight[4]
    one, same, other = (server.broadcast(client, 0).weights for client in (2, 4, 0))
    assert_same(one, same)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_what_is_sent_changes_between_rounds_only():
    server = server_of()
    sent = server.broadcast(0, 0).weights
    assert not any(tensor.requires_grad for tensor in sent.values())
    update = {name: tensor + 1 for name, tensor in sent.items()}
    server.receive(ClientUpdate(client=0, round=0, num_samples=3, weights=update))
    assert_same(server.broadcast(0, 0).weights, sent)
    server.aggregate()
    assert not torch.equal(server.broadcast(0, 1).weights["head.bias"], sent["head.bias"])
    held = server.broadcast(0, 1).weights
    server.aggregate()  # without any update
    assert_same(server.broadcast(0, 1).weights, held)


def test_novel_clients_get_the_model_of_the_mean_embedding():
    data = Toy(novel_clients=2)
    federation = run(METHOD, 2, cohorts=[[0, 1, 2]], data=data)
    network = federation.server.learner.network
    with torch.no_grad():
        expected = network(network.embeddings.weight[data.participating].mean(0))
    for client in data.novel:
        assert_same(named(federation.client_model(client)), expected, atol=1e-6)
    server = server_of()
    own = server.broadcast(1, 0).weights
    server.facts = RunFacts(4, None, frozenset({1}))
    assert not torch.equal(server.broadcast(1, 0).weights["head.weight"], own["head.weight"])


def test_buffers_are_not_generated():
    for batch_norm, affine in (("own", False), ("own_statistics", True)):
        client = PFedHN(normed_encoder((6,)), CLASSES, batch_norm=batch_norm)
        assert ("encoder.1.weight" in client.shared_names()) == affine
        assert "encoder.1.running_mean" not in client.shared_names()
    run(partial(METHOD, batch_norm="own_statistics"), 2, encoder=normed_encoder, data=Toy(batch_size=9))


def test_encoders_must_be_equal():
    with pytest.raises(ConfigurationError, match="PFedHN needs the same shapes"):
        run(METHOD, 1, encoder=[tiny_encoder, linear_encoder])


def test_a_round_that_is_undone_leaves_the_hypernetwork_as_it_was():
    """Its numbers are finite, and beyond what a server may hold; the step is fused."""
    with pytest.warns(UserWarning, match="round 1 is undone: .* is up to .* after the aggregation"):
        undone = run(partial(METHOD, server_lr=1e16), 1, cohorts=[[0]]).server.learner
    still = run(partial(METHOD, server_lr=1e-30), 1, cohorts=[[0]]).server.learner
    assert_same(undone.network.state_dict(), still.network.state_dict(), atol=0)
    assert undone.optimizer.state_dict()["state"] == {}


def test_a_non_finite_hypernetwork_is_taken_back():
    server = server_of(server_lr=1e38, server_clip=None)
    sent = server.broadcast(0, 0).weights
    update = {name: tensor + 1e10 for name, tensor in sent.items()}
    for client in (0, 1):
        server.receive(ClientUpdate(client=client, round=2, num_samples=3, weights=update))
    with pytest.warns(UserWarning, match="round 3: the server's network is kept as it was, .* lower server_lr"):
        server.aggregate()
    assert_same(server.broadcast(0, 3).weights, sent)


def test_traffic_is_that_of_fedavg():
    loops = [GivenCohorts([0, 3]), GivenCohorts([0, 3])]
    for loop, method in zip(loops, (METHOD, FedAvg), strict=True):
        run(partial(method, epochs=1), 1, loop=loop, limit_val_batches=0)
    assert loops[0].traffic.up == loops[1].traffic.up
    assert loops[0].traffic.down == loops[1].traffic.down


@pytest.mark.parametrize("server_steps", ["client", "sent"])
def test_models_that_came_are_not_copied_by_a_snapshot(server_steps):
    server = server_of(server_steps=server_steps)
    before = len(Snapshot(server)._tensors)
    for client in range(3):
        sent = server.broadcast(client, 0).weights
        server.receive(ClientUpdate(client=client, round=0, num_samples=3, weights=sent))
    assert len(Snapshot(server)._tensors) == before
