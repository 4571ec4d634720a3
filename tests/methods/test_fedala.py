"""FedALA (Zhang et al. 2023) against plain torch: what is mixed of received and own layers is learned before a fit."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from _helpers.plain import Net, batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.toy import BATCH, CLASSES, CLIENTS, INPUTS, SEED, Toy, assert_same, run, tiny_encoder
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.methods import FedALA, FedAvg
from pfl_lightning.seeding import derive_seed

EPOCHS, LR = 2, 0.05
COHORTS = [[0, 2, 3], [1, 2], [0, 2]]  # client 2 learns twice, client 4 never takes part
OPTIONS: dict[str, Any] = {"eta": 5.0, "window": 3, "threshold": 0.05, "sample_share": 0.7}
METHOD = partial(FedALA, lr=LR, epochs=EPOCHS, **OPTIONS)


@dataclass
class Restated:
    """The global model, and what each client keeps."""

    data: Toy
    layers: int | None = 2
    net: Net = field(default_factory=first_net)
    own: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)

    def play(self, round, cohort):
        trained = []
        for client in cohort:
            local = copy_of(self.net)
            if client in self.own:
                self.weights[client] = self.learn(local, client, round, "fit/model")
            sgd(local, batches(self.data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR)
            self.own[client] = named(local)
            trained.append(named(local))
        put(self.net, mean_of(trained, [len(self.data.labels[client]) for client in cohort]))

    def learn(self, local, client, round, purpose):
        """Change the local model in its last tensors; return the weights."""
        inputs, labels = self.data.tensors(client)
        names = [name for name, _ in local.named_parameters()]
        names = names if self.layers is None else names[-self.layers :]
        received, own = named(local), self.own[client]
        w = self.weights.get(client, {name: torch.ones_like(received[name]) for name in names})
        torch.manual_seed(derive_seed(SEED, purpose, round, client))
        losses = []
        while True:
            chosen = torch.randperm(len(labels))[: int(OPTIONS["sample_share"] * len(labels))]
            for rows in chosen.split(BATCH):
                at = {n: (own[n] + (received[n] - own[n]) * w[n]).requires_grad_() for n in names}
                loss = F.cross_entropy(functional_call(local, at, (inputs[rows],)), labels[rows])
                gradients = torch.autograd.grad(loss, list(at.values()))
                for n, g in zip(names, gradients, strict=True):
                    w = {**w, n: (w[n] - OPTIONS["eta"] * g * (received[n] - own[n])).clamp(0, 1)}
            losses.append(float(loss.detach()))
            recent = losses[-OPTIONS["window"] :]
            if client in self.weights or (len(losses) > len(recent) and np.std(recent) < OPTIONS["threshold"]):
                break
        self.passes.append(len(losses))
        put(local, {n: own[n] + (received[n] - own[n]) * w[n] for n in names})
        return w


@pytest.mark.parametrize("layers", [2, 3, None])
def test_rounds_and_evaluations_equal_the_restatement(layers):
    data = Toy()
    federation = run(partial(METHOD, layers=layers), len(COHORTS), cohorts=COHORTS, data=data)
    plain = Restated(data, layers)
    for round, cohort in enumerate(COHORTS):
        plain.play(round, cohort)
    got = federation.server.weights.as_state()
    assert_same({n: got[n] for n in named(plain.net)}, named(plain.net), atol=1e-5)
    assert plain.passes[0] > OPTIONS["window"]
    assert plain.passes[1:] == [plain.passes[1], 1]  # client 0 learns for the first time, client 2 again
    for client in range(CLIENTS):
        stored, weights = federation.personal.get(client), plain.weights.get(client, {})
        for name, w in weights.items():
            torch.testing.assert_close(stored[f"mixing.{name.replace('.', '/')}"], w, rtol=0, atol=1e-4)
        assert client not in (0, 2) or any(bool((w < 1).any()) and bool((w >= 0).all()) for w in weights.values())
        net = copy_of(plain.net)
        if client in plain.own:
            plain.learn(net, client, len(COHORTS) - 1, "evaluation/model")
        inputs, labels = data.tensors(client, "test")
        with torch.no_grad():
            assert federation.test_scores[client].loss == pytest.approx(
                float(F.cross_entropy(net(inputs), labels)), abs=1e-4
            )


@pytest.mark.parametrize("engine", [TrainerEngine, VectorizedEngine])
def test_an_evaluation_is_forgotten(engine):
    """Whether there are evaluations between the rounds or not."""
    states = [
        run(METHOD, 3, cohorts=COHORTS, engine=engine(), limit_val_batches=limit).personal.get(2) for limit in (0, 1.0)
    ]
    assert_same(dict(states[0]), dict(states[1]))


@pytest.mark.parametrize("layers", [2, None])
def test_with_weights_of_one_it_is_fedavg_bit_by_bit(layers):
    frozen = run(partial(METHOD, eta=0.0, layers=layers), 3, cohorts=COHORTS)
    average = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 3, cohorts=COHORTS)
    assert_same(frozen.server.weights.as_state(), average.server.weights.as_state())
    assert frozen.test_scores == average.test_scores


def test_with_weights_of_zero_the_upper_layers_stay_with_the_client():
    federation = run(METHOD, 2, cohorts=[[0, 2]])
    model, stored = federation.models[0], federation.personal.get(2)
    model.mixing.assign({name: torch.zeros_like(w) for name, w in model.mixing.as_state().items()})
    model.own.assign({name: stored[f"own.{name.replace('.', '/')}"] for name in model.mixing.as_state()})
    model.learned.fill_(1)
    model.eta = 0.0
    model._learn(None)
    assert torch.equal(model.head.weight, stored["own.head/weight"])


def test_a_novel_client_has_the_global_model():
    data = Toy(novel_clients=1)
    federation = run(METHOD, 3, cohorts=[[0, 1, 2, 3]], data=data)
    got = named(federation.client_model(data.novel[0]))
    assert_same({n: got[n] for n in named(first_net())}, {n: federation.server.weights.as_state()[n] for n in got})


def test_the_trained_model_can_be_evaluated():
    federation = run(partial(METHOD, eval_model="trained"), 3, cohorts=COHORTS)
    stored, model = federation.personal.get(0), federation.client_model(0)
    assert torch.equal(model.head.weight, stored["own.head/weight"])
    assert not any(name.startswith(("own.", "mixing.")) for name in model.exported_names())


def test_the_first_learning_ends():
    passes = []

    class Counting(FedALA):
        def _pass(self, context, *args):
            passes.append(context.round)
            return super()._pass(context, *args)

    counting = partial(Counting, lr=LR, epochs=1, max_passes=7, window=3)
    options = {"cohorts": [[0]], "limit_val_batches": 0, "limit_test_batches": 0}
    federation = run(partial(counting, threshold=0.0), 3, **options)
    assert int(federation.personal.get(0)["learned"]) == 2
    assert passes == [1] * 7 + [2]
    passes.clear()
    run(partial(counting, threshold=1e9), 2, **options)
    assert passes == [1] * 4  # one more than the window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": -1.0}, "eta must be a finite number of at least 0"),
        ({"sample_share": 0.0}, "sample_share must be a finite number above 0"),
        ({"sample_share": 1.5}, "sample_share must be between 0 and 1, got 1.5"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"max_passes": 0}, "max_passes must be at least 1"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedALA(tiny_encoder((INPUTS,)), CLASSES, **options)
