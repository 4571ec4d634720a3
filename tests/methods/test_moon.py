"""MOON against plain torch."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from _helpers.plain import batches, cross_entropy, mean_of, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    Toy,
    assert_same,
    dropout_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
)
from torch import nn
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import MOON, FedAvg
from pfl_lightning.methods.moon import model_contrastive_loss
from pfl_lightning.seeding import derive_seed

LR, EPOCHS, MU, TAU, OUT = 0.05, 1, 0.7, 0.3, 3
COHORTS = [[0, 2, 3], [1, 2, 3], [0, 2]]  # client 4 never takes part
METHOD = partial(MOON, lr=LR, epochs=EPOCHS, mu=MU, temperature=TAU, projection=OUT)


class Projected(nn.Module):
    """Encoder, projection and head, drawn in this order."""

    def __init__(self):
        super().__init__()
        self.encoder = tiny_encoder((INPUTS,))
        self.projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, OUT))
        self.head = nn.Linear(OUT, CLASSES)

    def represent(self, inputs):
        return self.projection(self.encoder(inputs))

    def forward(self, inputs):
        return self.head(self.represent(inputs))


def contrastive(received, previous):
    """Cross entropy, and mu times the mean over samples of -log of the positive's share."""

    def loss(net, inputs, labels):
        value = cross_entropy(net, inputs, labels)
        if previous is None:
            return value
        z = net.represent(inputs)
        with torch.no_grad():
            others = [other.represent(inputs) for other in (received, previous)]
        positive, negative = (torch.exp(F.cosine_similarity(z, other, dim=1) / TAU) for other in others)
        return value + MU * -torch.log(positive / (positive + negative)).mean()

    return loss


def restate(data):
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    net, own = Projected().double(), {}
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            local = copy.deepcopy(net)
            steps = ((x.double(), y) for x, y in batches(data, client, round, "fit/0", EPOCHS))
            sgd(local, steps, list(local.parameters()), LR, contrastive(net, own.get(client)))
            own[client] = local
            trained.append(named(local))
        put(net, mean_of(trained, [len(data.labels[client]) for client in cohort]))
    return net, own


def test_three_rounds_equal_the_restatement():
    data = Toy()
    federation = run(METHOD, 3, cohorts=COHORTS, data=data, precision="64-true", limit_val_batches=0)
    net, own = restate(data)
    assert_same(federation.server.weights.as_state(), named(net), 1e-8)
    for client in range(CLIENTS):
        stored = federation.personal.get(client)
        assert int(stored["has_previous"]) == (client in own)
        if client in own:
            kept = {n.removeprefix("previous.networks."): t for n, t in stored.items() if n.startswith("previous.")}
            expected = named(own[client].encoder)
            assert_same({n[2:]: t for n, t in kept.items() if n.startswith("0.")}, expected, 1e-8)
            assert_same({n[2:]: t for n, t in kept.items() if n.startswith("1.")}, named(own[client].projection), 1e-8)


def test_without_weight_it_is_fedavg():
    """Also with dropout: the frozen copies draw no numbers."""
    options = {"cohorts": COHORTS, "encoder": dropout_encoder, "limit_val_batches": 0}
    plain = run(partial(FedAvg, lr=LR, epochs=1), 3, **options)
    own = run(partial(METHOD, mu=0.0, projection=None, epochs=1), 3, **options)
    assert_same(own.server.weights.as_state(), plain.server.weights.as_state())


def test_the_first_fit_of_every_client_is_fedavgs():
    cohorts = [[0, 1], [0, 1]]
    plain, own = (
        [
            run(partial(method, lr=LR, epochs=1, **options), rounds, cohorts=cohorts, limit_val_batches=0)
            for rounds in (1, 2)
        ]
        for method, options in ((FedAvg, {}), (MOON, {"projection": None}))
    )
    assert_same(own[0].server.weights.as_state(), plain[0].server.weights.as_state())
    difference = own[1].server.weights.as_state()["head.weight"] - plain[1].server.weights.as_state()["head.weight"]
    assert float(difference.abs().max()) > 1e-4


def test_a_previous_model_equal_to_the_received_one_has_no_effect():
    z = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    other = torch.randn(6, 4, dtype=torch.float64)
    loss = model_contrastive_loss(z, other, other, TAU)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
    [gradient] = torch.autograd.grad(loss, [z])
    assert torch.equal(gradient, torch.zeros_like(z))


def test_the_term_is_finite_for_small_temperatures_and_zero_vectors():
    z = torch.zeros(2, 3, requires_grad=True)
    loss = model_contrastive_loss(z, torch.ones(2, 3), -torch.ones(2, 3), 1e-4)
    [gradient] = torch.autograd.grad(loss, [z])
    assert bool(torch.isfinite(gradient).all())
    far = model_contrastive_loss(-torch.ones(2, 3), torch.ones(2, 3), -torch.ones(2, 3), 1e-3)
    assert float(far) == pytest.approx(2000.0)


class Watched(MOON):
    """Says in which modes its networks are while it trains."""

    def training_step(self, batch, batch_idx):
        copies = (layer for copied in (self.received, self.previous) for layer in copied.modules())
        assert self.encoder.training
        assert not any(layer.training for layer in copies)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("encoder", [normed_encoder, dropout_encoder])
def test_frozen_copies_stay_in_evaluation_mode(encoder, engine):
    data = Toy([[0] * 6 + [1] * 6, [1] * 4 + [2] * 4])
    method = partial(Watched, lr=LR, epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found .* in eval mode")
        federation = run(method, 2, cohorts=[[0, 1]], data=data, encoder=encoder, engine=engine())
    stored = federation.personal.get(0)
    tracked = [int(tensor) for name, tensor in stored.items() if name.endswith("num_batches_tracked")]
    assert tracked in ([], [3 + 3])  # the rounded mean of 3 and 2 steps, and the three of the second round


def test_vectorized_with_batch_normalization():
    data = partial(Toy, [[0] * 6 + [1] * 6, [1] * 6 + [2] * 6, [0] * 6 + [3] * 6])
    one, many = (
        run(METHOD, 2, cohorts=[[0, 1, 2]], data=data(), encoder=normed_encoder, engine=engine)
        for engine in (None, VectorizedEngine(forward="vmap"))
    )
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_what_travels_and_what_stays():
    federation = run(METHOD, 1, cohorts=COHORTS)
    sent = federation.server.broadcast(0, 1).weights
    assert {name.split(".")[0] for name in sent} == {"encoder", "projection", "head"}
    assert {name.split(".")[0] for name in federation.personal.get(0)} == {"previous", "has_previous"}
    exported = federation.client_model(0).state_dict()
    assert {name.split(".")[0] for name in exported} >= {"encoder", "projection", "head"}


def masked_encoder(input_shape):
    """Its first layer is frozen; a mask of infinities is no part of its state."""
    encoder = tiny_encoder(input_shape)
    encoder[0].requires_grad_(False)
    encoder[0].register_buffer("mask", torch.tensor([0.0, -torch.inf]), persistent=False)
    encoder[0].register_forward_hook(lambda layer, inputs, output: output + layer.mask[0])
    return encoder


def test_what_never_changes_is_not_kept_by_every_client():
    federation = run(METHOD, 2, cohorts=COHORTS, encoder=masked_encoder)
    kept = federation.personal.get(0)
    assert {name for name in kept if name.startswith("previous.networks.0.")} == {
        "previous.networks.0.2.weight",
        "previous.networks.0.2.bias",
    }
    assert federation.personal.written(0)  # nobody was left out
    frozen = federation.models[0].previous.networks[0][0]
    assert torch.equal(frozen.weight, federation.models[0].encoder[0].weight)
    many = run(METHOD, 2, cohorts=COHORTS, encoder=masked_encoder, engine=VectorizedEngine(forward="vmap"))
    assert_same(whole_state(many), whole_state(federation), atol=1e-5)


def test_novel_clients_and_fine_tuning():
    data = Toy(novel_clients=1)
    federation = run(partial(METHOD, fine_tune="head"), 2, cohorts=[[0, 2], [1, 2]], data=data)
    weights = federation.server.weights.as_state()
    plain = run(METHOD, 2, cohorts=[[0, 2], [1, 2]], data=Toy(novel_clients=1))
    assert_same(weights, plain.server.weights.as_state())
    tuned = named(federation.client_model(data.novel[0]))
    assert not torch.equal(tuned["head.weight"], weights["head.weight"])
    assert torch.equal(tuned["projection.0.weight"], weights["projection.0.weight"])


class Recurrent(nn.Module):
    out_features = 4

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)


@pytest.mark.parametrize(
    ("encoder", "options", "error", "message"),
    [
        (tiny_encoder((6,)), {"mu": -1.0}, ValueError, "mu must be a finite number of at least 0"),
        (tiny_encoder((6,)), {"temperature": 0.0}, ValueError, r"temperature \(tau\) must be a finite number above 0"),
        (tiny_encoder((6,)), {"projection": 0}, ValueError, "projection must be at least 1"),
        (Recurrent(), {}, ConfigurationError, "the recurrent layer GRU, which cannot be copied and frozen"),
    ],
)
def test_bad_arguments_are_refused(encoder, options, error, message):
    with pytest.raises(error, match=message):
        MOON(encoder, 5, **options)
