"""FedEM (Marfoq et al. 2021) against plain torch: one sample and one component at a time."""

import itertools
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, mean_of, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    INPUTS,
    SEED,
    Toy,
    assert_same,
    dropout_encoder,
    run,
    tiny_encoder,
)
from torch import nn
from torch.nn import functional as F

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedEM
from pfl_lightning.seeding import derive_seed
from pfl_lightning.server import AveragingAggregator

LR, EPOCHS = 0.05, 2
COHORTS = [[0, 2, 3], [1, 2], [0, 4, 2]]
METHOD = partial(FedEM, lr=LR, epochs=EPOCHS)


def first_nets(components):
    """The first weights of all components, drawn one after another."""
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    nets = [Net() for _ in range(components)]
    for number, net in enumerate(nets[1:], start=1):  # whose encoders are made once more
        torch.manual_seed(derive_seed(SEED, "further weights", 0, number))
        net.encoder = tiny_encoder((INPUTS,))
    return nets


def expect(nets, mixture, inputs, labels):
    """q of each sample, and their mean."""
    rows = []
    with torch.no_grad():
        for x, y in zip(inputs, labels, strict=True):
            likely = [p * float(net(x[None]).softmax(1)[0, y]) for p, net in zip(mixture, nets, strict=True)]
            rows.append([value / sum(likely) for value in likely])
    q = torch.tensor(rows)
    return q, q.mean(0).tolist()


class All(nn.Module):
    """Several nets as one."""

    def __init__(self, nets):
        super().__init__()
        self.nets = nn.ModuleList(nets)


def restate(data, components, rounds=COHORTS):
    """The components and everybody's mixture after the rounds."""
    nets, mixtures = first_nets(components), [[1 / components] * components for _ in range(CLIENTS)]
    for round, cohort in enumerate(rounds):
        trained, sizes = [], []
        for client in cohort:
            inputs, labels = data.tensors(client)
            local = All([copy_of(net) for net in nets])
            q, mixtures[client] = expect(local.nets, mixtures[client], inputs, labels)
            of = {tuple(x.tolist()): row for x, row in zip(inputs, q, strict=True)}

            def loss(local, x, y, of=of):
                total = 0
                for own, label in zip(x, y, strict=True):
                    row = of[tuple(own.tolist())]
                    for weight, net in zip(row, local.nets, strict=True):
                        total = total + weight * F.cross_entropy(net(own[None]), label[None])
                return total / len(y)

            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR, loss)
            trained.append(named(local))
            sizes.append(len(labels))
        whole = All(nets)
        put(whole, mean_of(trained, sizes))
    return nets, mixtures


def components_of(model, count):
    """The parameters of each component, by the names of a plain net."""
    found = []
    for number in range(count):
        suffix = f"_{number}" if number else ""
        own = {"encoder": model.get_submodule(f"encoder{suffix}"), "head": model.get_submodule(f"head{suffix}")}
        found.append(
            {f"{part}.{n}": p.detach().clone() for part, net in own.items() for n, p in net.named_parameters()}
        )
    return found


@pytest.mark.parametrize("components", [2, 3])
def test_rounds_equal_the_restatement(components):
    data = Toy()
    federation = run(partial(METHOD, components=components), 3, cohorts=COHORTS, data=data)
    nets, mixtures = restate(data, components)
    for client in range(CLIENTS):
        model = federation.client_model(client)
        for own, net in zip(components_of(model, components), nets, strict=True):
            assert_same(own, named(net), atol=1e-5)
        torch.testing.assert_close(model.mixture, torch.tensor(mixtures[client]), atol=1e-5, rtol=0)
    inputs, _ = data.tensors(2, "test")
    with torch.no_grad():
        mixed = sum(p * net(inputs).softmax(1) for p, net in zip(mixtures[2], nets, strict=True))
        torch.testing.assert_close(federation.client_model(2)(inputs), mixed.log(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("encoder", [tiny_encoder, dropout_encoder])
def test_one_component_is_fedavg_bit_by_bit(encoder):
    options = {"lr": LR, "epochs": EPOCHS}
    got = run(partial(FedEM, components=1, **options), 2, cohorts=COHORTS, encoder=encoder)
    expected = run(partial(FedAvg, **options), 2, cohorts=COHORTS, encoder=encoder)
    assert_same(named(got.client_model(1)), named(expected.client_model(1)))
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].accuracy == score.accuracy
        assert got.test_scores[client].loss == pytest.approx(score.loss, abs=1e-5)


class EqualStarts(FedEM):
    """All components begin with the weights of the first."""

    def configure_aggregator(self, num_clients):
        for number in range(1, self.num_components):
            self.get_submodule(f"encoder_{number}").load_state_dict(self.encoder.state_dict())
            self.get_submodule(f"head_{number}").load_state_dict(self.head.state_dict())
        return AveragingAggregator(self, num_clients)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_components_stay_equal_and_follow_fedavg_at_a_part_of_the_rate(momentum):
    options = {"epochs": EPOCHS, "momentum": momentum, "weight_decay": 0.0}
    federation = run(partial(EqualStarts, lr=3 * LR, components=3, **options), 2, cohorts=COHORTS, precision="64-true")
    average = run(partial(FedAvg, lr=LR, **options), 2, cohorts=COHORTS, precision="64-true")
    for own in components_of(federation.client_model(0), 3):
        assert_same(own, named(average.client_model(0)), atol=1e-7)  # q is of single precision


def test_the_likelihood_never_falls_under_steps_on_all_samples():
    """A convex toy: linear components on frozen features, one client, one batch, small steps."""

    def frozen(input_shape):
        return nn.Linear(input_shape[0], 4).requires_grad_(False)

    labels, found = [[0] * 6 + [1] * 7 + [2] * 6], []

    class Watched(FedEM):
        def before_fit(self, context):
            inputs, classes = context.data.tensors()
            with torch.no_grad():
                found.append(float(self(context.data.convert_input(inputs)).gather(1, classes[:, None]).mean()))
            super().before_fit(context)

    method = partial(Watched, lr=0.05, epochs=1, components=2, momentum=0.0, weight_decay=0.0)
    run(method, 12, cohorts=[[0]], data=Toy(labels, batch_size=100), encoder=frozen, precision="64-true")
    assert len(found) == 12
    assert all(later > earlier for earlier, later in itertools.pairwise(found))


class Fixed(nn.Module):
    """A layer that cannot draw new weights."""

    out_features = 6

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, inputs):
        return self.scale * inputs


def test_components_that_would_stay_equal_are_refused():
    client = FedEM(Fixed(), CLASSES, components=2)
    with pytest.warns(UserWarning, match=r"component 2 of FedEM begins with the encoder of the first one"):
        client.configure_aggregator(CLIENTS)
    client.get_submodule("head_1").load_state_dict(client.head.state_dict())
    with pytest.raises(
        ConfigurationError,
        match=r"component 2 of FedEM would begin with the weights of the first one.*reset_parameters",
    ):
        client.configure_aggregator(CLIENTS)
    assert FedEM(Fixed(), CLASSES, components=1).configure_aggregator(CLIENTS)


def test_encoders_are_made_once_more_for_further_components():
    """What a constructor draws is drawn for each; what is frozen stays the first one's."""

    def encoder(input_shape):
        made = tiny_encoder(input_shape)
        nn.init.normal_(made[2].weight, mean=5)
        made[0].requires_grad_(False)
        return made

    client = run(METHOD, 1, cohorts=[[0]], encoder=encoder, limit_val_batches=0).models[0]
    first, other = client.encoder, client.get_submodule("encoder_2")
    assert other[0].weight is first[0].weight
    assert other[2].weight.mean() > 4
    assert not torch.equal(other[2].weight, first[2].weight)


def test_frozen_layers_are_the_same_in_all_components():
    encoder = tiny_encoder((6,))
    encoder[0].requires_grad_(False)
    client = FedEM(encoder, CLASSES, components=2)
    other = client.get_submodule("encoder_1")
    assert other[0].weight is encoder[0].weight
    assert not torch.equal(other[2].weight, encoder[2].weight)
    assert {"encoder.0.weight", "encoder_1.0.weight"} <= client.frozen


def test_novel_clients_get_their_mixture_by_one_step_from_equal_weights():
    data = Toy(novel_clients=1)
    data.setup()
    (novel,) = data.novel
    federation = run(partial(METHOD, components=2), 2, cohorts=[[0, 1, 2, 3]], data=data)
    model = federation.client_model(novel)
    nets = [Net(), Net()]
    for net, own in zip(nets, components_of(model, 2), strict=True):
        put(net, own)
    _, mixture = expect(nets, [0.5, 0.5], *data.tensors(novel))
    torch.testing.assert_close(model.mixture, torch.tensor(mixture), atol=1e-5, rtol=0)
    stored = federation.personal.get(novel)["mixture"]
    assert stored.tolist() == [0.5, 0.5]  # and forget it


def test_a_run_in_double_precision_is_so_throughout():
    data = Toy()
    federation = run(partial(METHOD, components=3), 1, cohorts=[[0, 1]], data=data, precision="64-true")
    model = federation.client_model(4)  # which has not trained: its mixture is that of its first E step
    nets = [Net().double() for _ in range(3)]
    for net, own in zip(nets, components_of(model, 3), strict=True):
        put(net, own)
    inputs, labels = data.tensors(4)
    with torch.no_grad():
        spoken = torch.stack([net(inputs.double()).softmax(1) for net in nets])  # (M, N, C)
        likely = spoken[:, torch.arange(len(labels)), labels]
        mixture = (likely / likely.sum(0)).mean(1)
        mixed = (mixture[:, None, None] * spoken).sum(0).log()
        torch.testing.assert_close(model.mixture, mixture, atol=1e-13, rtol=0)
        torch.testing.assert_close(model(inputs.double()), mixed, atol=1e-13, rtol=0)


def test_fine_tuning_trains_on_responsibilities_at_the_received_components():
    data = Toy()
    federation = run(partial(METHOD, components=2, fine_tune="all"), 1, cohorts=[[0, 1, 2]], data=data)
    nets, mixtures = restate(data, 2, [[0, 1, 2]])
    client, local = 1, All([copy_of(net) for net in nets])
    inputs, labels = data.tensors(client)
    q, _ = expect(nets, mixtures[client], inputs, labels)
    of = {tuple(x.tolist()): row for x, row in zip(inputs, q, strict=True)}

    def loss(local, x, y):
        rows = torch.stack([of[tuple(own.tolist())] for own in x])
        losses = torch.stack([F.cross_entropy(net(x), y, reduction="none") for net in local.nets], dim=1)
        return (rows * losses).sum(1).mean()

    sgd(local, batches(data, client, 0, "personalize/0", 1), list(local.parameters()), LR, loss)
    model = federation.client_model(client)
    for own, net in zip(components_of(model, 2), local.nets, strict=True):
        assert_same(own, named(net), atol=1e-5)
    torch.testing.assert_close(model.mixture, torch.tensor(mixtures[client]), atol=1e-5, rtol=0)


def test_what_is_sent_and_kept():
    client = FedEM(tiny_encoder((6,)), CLASSES, components=3)
    size = sum(p.numel() for p in Net().parameters())
    assert client.configure_aggregator(CLIENTS).broadcast(0, 0).num_bytes == 3 * 4 * size
    assert client.personal_names() == ["mixture"]
    with pytest.raises(ValueError, match="components must be at least 1"):
        FedEM(tiny_encoder((6,)), CLASSES, components=0)


def test_an_exported_model_trains_on_its_own_responsibilities():
    model = run(partial(METHOD, components=2), 1).client_model(0)
    inputs, labels = Toy().tensors(0)
    q, _ = expect([put_in(own) for own in components_of(model, 2)], model.mixture.tolist(), inputs, labels)
    losses = torch.stack([cross_entropy_of(put_in(own), inputs, labels) for own in components_of(model, 2)], dim=1)
    got = model.training_step((inputs, labels), 0)["loss"]
    torch.testing.assert_close(got.detach(), (q * losses).sum(1).mean(), atol=1e-5, rtol=0)


def put_in(own):
    net = Net()
    put(net, own)
    return net


def cross_entropy_of(net, inputs, labels):
    with torch.no_grad():
        return F.cross_entropy(net(inputs), labels, reduction="none")
