"""FedAS (Yang et al. 2024) against plain torch: alignment to a client's class means, and a mean by Fisher traces."""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from _helpers.plain import Net, copy_of, cross_entropy, first_net, mean_of, named, put, sgd
from _helpers.toy import (
    BATCH,
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    normed_encoder,
    own_model,
    run,
    tiny_encoder,
    whole_state,
)
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.methods import FedAS, FedPer
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, ALIGN = 2, 0.05, {"alignment_lr": 0.3, "alignment_batch_size": 6, "alignment_epochs": 2}
COHORTS = [[0, 2, 3], [1, 2], [0, 2]]  # client 2 aligns twice, client 4 never takes part
METHOD = partial(FedAS, lr=LR, epochs=EPOCHS, **ALIGN)


def parts(data, client, round, phase, epochs, size):
    inputs, labels = data.tensors(client)
    generator = torch.Generator().manual_seed(derive_seed(SEED, f"fit/{phase}", round, client))
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(size):
            yield [inputs[rows], labels[rows]]


@dataclass
class Restated:
    """Everybody's last model, and the global encoder."""

    data: Toy
    nets: dict[int, Net] = field(default_factory=dict)
    start: Net = field(default_factory=first_net)

    def play(self, round, cohort):
        fishers = []
        encoder = named(self.start, "encoder.")
        for client in cohort:
            net, phase = copy_of(self.nets.get(client, first_net())), 0
            if client in self.nets:
                means = self.means(net, client)
                put(net, encoder)
                steps = parts(self.data, client, round, 0, ALIGN["alignment_epochs"], ALIGN["alignment_batch_size"])
                sgd(net, steps, list(net.encoder.parameters()), ALIGN["alignment_lr"], towards(means), 0.0, 0.0)
                phase = 1
            put(net, encoder if phase == 0 else {})
            sgd(net, parts(self.data, client, round, phase, EPOCHS, BATCH), list(net.parameters()), LR)
            fishers.append(self.fisher(net, client))
            self.nets[client] = net
        put(self.start, mean_of([named(self.nets[client], "encoder.") for client in cohort], fishers))

    def means(self, net, client) -> dict[int, Tensor]:
        inputs, labels = self.data.tensors(client)
        with torch.no_grad():
            features = net.encoder(inputs)
        return {int(c): features[labels == c].mean(dim=0) for c in labels.unique()}

    def fisher(self, net, client) -> float:
        total = 0.0
        for inputs, labels in zip(*(part.split(BATCH) for part in self.data.tensors(client)), strict=True):
            gradients = torch.autograd.grad(cross_entropy(net, inputs, labels), list(net.parameters()))
            total += sum(float(g.square().sum()) for g in gradients)
        return total


def towards(means):
    def loss(net, inputs, labels):
        features = net.encoder(inputs)
        return sum(
            F.mse_loss(features[labels == c], means[int(c)].expand(int((labels == c).sum()), FEATURES))
            for c in labels.unique()
        )

    return loss


def test_rounds_equal_the_restatement():
    data = Toy()
    federation, plain = run(METHOD, len(COHORTS), cohorts=COHORTS, data=data), Restated(data)
    for round, cohort in enumerate(COHORTS):
        plain.play(round, cohort)
    encoder = federation.server.weights.as_state()
    assert_same({n: encoder[n] for n in named(plain.start, "encoder.")}, named(plain.start, "encoder."), atol=1e-5)
    for client in range(CLIENTS):
        net = plain.nets.get(client)
        if net is None:  # the global encoder under the first head
            net = copy_of(plain.start)
        got = named(federation.client_model(client))
        assert_same({name: got[name] for name in named(net)}, named(net), atol=1e-5)
        inputs, labels = data.tensors(client, "test")
        loss = float(cross_entropy(net, inputs, labels).detach())
        assert federation.test_scores[client].loss == pytest.approx(loss, abs=1e-4)


def test_in_double_precision_traces_are_double():
    data = Toy()
    federation = run(METHOD, cohorts=[[0, 3]], data=data, precision="64-true", limit_val_batches=0)
    nets = [federation.client_model(client) for client in (0, 3)]
    traces = []
    for net, client in zip(nets, (0, 3), strict=True):
        total = 0.0
        for inputs, labels in zip(*(part.split(BATCH) for part in data.tensors(client)), strict=True):
            loss = F.cross_entropy(net(inputs.double()), labels)
            total += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(net.parameters())))
        traces.append(total)
    encoder = federation.server.weights.as_state()
    expected = mean_of([{name: named(net)[name] for name in encoder} for net in nets], traces)
    assert_same(dict(encoder), expected, atol=1e-14)


def test_the_cases_are_not_trivial():
    """Alignment moves the encoder, and the clients' Fisher traces differ."""
    states = {}
    for name, options in {"all": {}, "none": {"alignment_epochs": 0}, "plain": {"aggregation": "plain"}}.items():
        federation = run(partial(METHOD, **options), 3, cohorts=COHORTS, limit_val_batches=0)
        states[name] = federation.server.weights.as_state()["encoder.0.weight"]
    assert not torch.allclose(states["all"], states["none"], atol=1e-4)
    assert not torch.allclose(states["all"], states["plain"], atol=1e-4)


@pytest.mark.parametrize("engine", [None, VectorizedEngine])
@pytest.mark.parametrize("aggregation", ["plain", "samples"])
def test_without_alignment_and_with_equal_traces_it_is_fedper(engine, aggregation):
    class Plain(FedPer):
        def configure_aggregator(self, num_clients):
            aggregator = super().configure_aggregator(num_clients)
            aggregator.by_samples = aggregation == "samples"
            return aggregator

    options = {"cohorts": COHORTS}
    method = partial(METHOD, alignment_epochs=0, aggregation=aggregation, eval_model="aggregated")
    got = run(method, 3, engine=engine and engine(), **options)
    expected = run(partial(Plain, lr=LR, epochs=EPOCHS), 3, engine=engine and engine(), **options)
    states = [
        {name: value for name, value in whole_state(one).items() if "prototypes" not in name and "present" not in name}
        for one in (got, expected)
    ]
    if engine is None:
        assert_same(*states)
    else:  # which pads the last batches of FedPer's clients, whose loss is a mean over samples, and not those of FedAS
        torch.testing.assert_close(*states)


@pytest.mark.parametrize("engine", [None, TrainerEngine, VectorizedEngine])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_the_alignment_normalizes_by_batches_or_by_running_statistics(mode, engine):
    """One client, so that what it receives is what it sent; its class means are of evaluation mode in either case.

    Of thirteen samples in batches of six the last is alone in its batch, by which nothing can be normalized.
    """
    data = partial(Toy, [[0] * 7 + [1] * 6], batch_size=13)
    method = partial(METHOD, alignment_mode=mode)
    federation = run(method, 2, cohorts=[[0]], data=data(), encoder=normed_encoder, engine=engine and engine())
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    net, plain = Net(normed_encoder), Restated(data())
    inputs, labels = plain.data.tensors(0)
    sgd(net.train(), [[inputs, labels]] * EPOCHS, list(net.parameters()), LR)
    means = plain.means(net.eval(), 0)
    steps = parts(plain.data, 0, 1, 0, ALIGN["alignment_epochs"], ALIGN["alignment_batch_size"])
    steps = [step for step in steps if mode == "evaluation" or len(step[0]) > 1]
    sgd(net.train(mode == "training"), steps, [*net.encoder.parameters()], ALIGN["alignment_lr"], towards(means), 0, 0)
    sgd(net.train(), [[inputs, labels]] * EPOCHS, list(net.parameters()), LR)
    got = federation.personal.get(0)
    assert_same({name: got[name] for name in net.state_dict()}, net.state_dict(), atol=1e-5)


def test_an_alignment_in_evaluation_mode_is_without_dropout():
    layers = [nn.Linear(INPUTS, FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5), nn.LSTM(FEATURES, FEATURES)]
    encoder = nn.Sequential(*layers)
    encoder.out_features = FEATURES
    client = FedAS(encoder, CLASSES, alignment_mode="evaluation")
    assert not list(client.frozen_norms())
    client.phase = Phase("alignment", ("encoder.*",), losses=("alignment",))
    assert list(client.frozen_norms()) == layers[:3]
    client.alignment_mode = "training"
    assert not list(client.frozen_norms())


def test_traces_of_zero_count_the_same():
    federation = run(partial(METHOD, lr=0.0, alignment_lr=0.0), 2, cohorts=[[0, 2]])
    first = named(first_net(), "encoder.")
    server = federation.server
    assert_same({name: server.weights.as_state()[name] for name in first}, first, atol=1e-7)
    model, context = federation.models[0], federation.evaluation_task(0).context
    for client, shift in ((0, 0.0), (2, 2.0)):
        update = model.make_update(context, None)
        weights = {name: torch.full_like(value, shift) for name, value in update.weights.items()}
        server.receive(replace(update, client=client, weights=weights, fisher=torch.zeros(())))
    server.aggregate()
    assert all(torch.equal(value, torch.ones_like(value)) for value in server.weights.as_state().values())


def test_what_travels_and_what_is_kept():
    loop = GivenCohorts([0, 3])
    federation = run(METHOD, 1, loop=loop, limit_val_batches=0)
    size = 4 * sum(p.numel() for p in tiny_encoder((INPUTS,)).parameters())
    assert loop.traffic.down == {"weights": 2 * size}
    assert loop.traffic.up == {"weights": 2 * size, "statistics": 2 * 4}
    stored = federation.personal.get(3)
    assert stored["present"].tolist() == [False, False, False, True, True]
    features, labels = Toy().tensors(3)
    with torch.no_grad():
        features = own_model(federation, 3).encoder(features)
    torch.testing.assert_close(stored["prototypes"][4], features[labels == 4].mean(dim=0), rtol=0, atol=1e-6)


def test_a_novel_client_takes_the_global_encoder_and_may_be_fine_tuned():
    data = Toy(novel_clients=1)
    federation = run(METHOD, 2, cohorts=[[0, 1, 2]], data=data)
    encoder = named(federation.client_model(data.novel[0]), "encoder.")
    assert_same(encoder, {name: federation.server.weights.as_state()[name] for name in encoder})
    tuned = run(partial(METHOD, fine_tune="all"), 2, cohorts=[[0, 1, 2]], data=Toy(novel_clients=1))
    assert not torch.equal(named(tuned.client_model(data.novel[0]))["head.weight"], named(first_net())["head.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment_epochs": -1}, "alignment_epochs must be at least 0"),
        ({"alignment_lr": -0.1}, "alignment_lr must be a finite number of at least 0"),
        ({"alignment_batch_size": 0}, "alignment_batch_size must be at least 1"),
        ({"alignment_mode": "eval"}, "alignment_mode must be one of"),
        ({"aggregation": "Fisher"}, "aggregation must be one of .* did you mean 'fisher'"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedAS(tiny_encoder((INPUTS,)), CLASSES, **options)
