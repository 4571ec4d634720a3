"""Every objective against its restatement in plain torch."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from lightly.loss import NTXentLoss
from plain_objectives import (
    PlainBYOL,
    PlainMoCo,
    PlainSimCLR,
    PlainSimSiam,
    PlainSMoG,
    PlainSwAV,
    descend,
)
from torch import nn
from torch.nn import functional as F
from toy import normed_encoder, tiny_encoder

from pfl_lightning.client import FitContext
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.self_supervised import BYOL, OBJECTIVES, MoCoV2, Objective, SimCLR, SimSiam, SMoG, SwAV

HIDDEN, OUT, BATCH, LR = 7, 5, 6, 0.1
BANK, PROTOTYPES, GROUPS = 20, 9, 4
SMALL = {"hidden": HIDDEN, "out": OUT}


class SymmetricPlainMoCo(PlainMoCo):
    symmetric = True


CASES = {
    "simclr": (partial(SimCLR, **SMALL), PlainSimCLR),
    "byol": (partial(BYOL, **SMALL, momentum=0.9), PlainBYOL),
    "byol without normalisation": (partial(BYOL, **SMALL, momentum=0.9, batch_norm=False), PlainBYOL),
    "simsiam": (partial(SimSiam, **SMALL), PlainSimSiam),
    "mocov2": (partial(MoCoV2, **SMALL, bank=BANK, momentum=0.9), PlainMoCo),
    "mocov2 symmetric": (partial(MoCoV2, **SMALL, bank=BANK, momentum=0.9, symmetric=True), SymmetricPlainMoCo),
    "swav": (partial(SwAV, **SMALL, prototypes=PROTOTYPES), PlainSwAV),
    "smog": (partial(SMoG, **SMALL, groups=GROUPS, beta=0.8, momentum=0.9), PlainSMoG),
}


@dataclass
class Samples:
    """What an objective asks of a client's data."""

    inputs: torch.Tensor

    @property
    def num_samples(self):
        return len(self.inputs)

    def features(self, encoder):
        with torch.no_grad():
            found = encoder.eval()(self.inputs)
        encoder.train()
        return found, None

    forward_context = staticmethod(torch.no_grad)


def context(samples=40, seed=3):
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return FitContext(client=4, round=2, data=Samples(inputs))


def built(make, encoder=tiny_encoder):
    torch.manual_seed(0)
    network = encoder((6,)).double()
    return network, make(network).double()


def views(steps, batch=BATCH):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(2, batch, 6, generator=generator, dtype=torch.float64).unbind(0)


def start(plain, objective):
    """What the objective has made for this fit."""
    if isinstance(objective, MoCoV2):
        plain.start(objective.bank)
    elif isinstance(objective, SwAV):
        plain.start(objective.prototypes.weight)
    elif isinstance(objective, SMoG):
        plain.start(objective.groups.group_features)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder], ids=["plain", "with batch norm"])
@pytest.mark.parametrize(("make", "restated"), CASES.values(), ids=CASES)
def test_four_steps_equal_the_restatement(make, restated, encoder):
    network, objective = built(make, encoder)
    objective.before_fit(network, context())
    plain = restated(network, objective)
    start(plain, objective)
    for first, second in views(4):
        output, expected = objective(network, first, second), plain.loss(first, second)
        assert output.loss.shape == ()
        close(output.loss, expected)
        descend([*network.parameters(), *objective.parameters()], output.loss, LR)
        descend(plain.parameters(), expected, LR)
    parts = {"encoder": network, "projector": objective.projector, "predictor": getattr(objective, "predictor", None)}
    got = {f"{part}.{n}": t for part, net in parts.items() if net for n, t in net.state_dict().items()}
    for name, tensor in plain.named().items():
        close(got[name], tensor)
    if hasattr(objective, "target"):
        for copy, expected in zip(objective.target.copies, plain.target(), strict=True):
            buffers = dict(copy.named_buffers())
            assert set(buffers) == set(expected)
            for name, tensor in expected.items():
                close(buffers[name], tensor)
    if isinstance(objective, MoCoV2):
        close(objective.bank, torch.stack(plain.bank))
    if isinstance(objective, SwAV):
        close(objective.prototypes.weight, plain.prototypes)
    if isinstance(objective, SMoG):
        close(objective.groups.group_features, plain.groups)


@pytest.mark.parametrize(("make", "restated"), CASES.values(), ids=CASES)
def test_encodings_and_projections_are_those_of_the_clients_own_networks(make, restated):
    network, objective = built(make)
    objective.before_fit(network, context())
    [(first, second)] = views(1)
    output = objective(network, first, second)
    both = network(torch.cat([first, second]))
    close(torch.cat(output.encodings), both)
    close(torch.cat(output.projections), objective.projector(both))
    assert [z.shape for z in output.encodings] == [(BATCH, 4)] * 2
    assert [p.shape for p in output.projections] == [(BATCH, OUT)] * 2
    assert all(tensor.requires_grad for tensor in (*output.encodings, *output.projections))


@pytest.mark.parametrize(("make", "restated"), CASES.values(), ids=CASES)
def test_all_parameters_train_and_nothing_else_has_a_gradient(make, restated):
    network, objective = built(make)
    objective.before_fit(network, context())
    [(first, second)] = views(1)
    objective(network, first, second).loss.backward()
    named = dict(objective.named_parameters())
    assert {name.split(".")[0] for name in named} <= {"projector", "predictor", "prototypes"}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*named.values(), *network.parameters()))
    assert not any(buffer.requires_grad for buffer in objective.buffers())


# Linear layers, and whether each is followed by normalisation, as the papers have them.
HEADS = {
    "simclr": ({"projector": [(512, 2048), (2048, 256)]}, {"projector": 2}),
    "byol": ({"projector": [(512, 2048), (2048, 256)], "predictor": [(256, 2048), (2048, 256)]}, {"projector": 1}),
    "simsiam": (
        {"projector": [(512, 2048), (2048, 2048), (2048, 256)], "predictor": [(256, 64), (64, 256)]},
        {"projector": 3, "predictor": 1},
    ),
    "mocov2": ({"projector": [(512, 2048), (2048, 256)]}, {"projector": 0}),
    "swav": ({"projector": [(512, 2048), (2048, 256)], "prototypes": [(256, 512)]}, {"projector": 1}),
    "smog": ({"projector": [(512, 2048), (2048, 256)], "predictor": [(256, 2048), (2048, 256)]}, {"projector": 2}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_widths_by_default(name):
    encoder = nn.Linear(3, 512)
    encoder.out_features = 512
    objective = OBJECTIVES[name](encoder)
    widths, norms = HEADS[name]
    for part, expected in widths.items():
        modules = list(getattr(objective, part).modules())
        assert [(m.in_features, m.out_features) for m in modules if isinstance(m, nn.Linear)] == expected
        if part in norms:
            assert sum(isinstance(m, nn.BatchNorm1d) for m in modules) == norms[part]
    assert {part for part in ("predictor", "prototypes") if hasattr(objective, part)} == set(widths) - {"projector"}


# ---------------------------------------------------------------------- what is particular to one


def test_swav_descends_as_the_published_code_up_to_the_second_order_of_the_learning_rate():
    """There the weights are divided by their length before every step."""

    def difference(lr):
        network, objective = built(CASES["swav"][0])
        plain = PlainSwAV(network, objective)
        plain.start(F.normalize(objective.prototypes.weight.detach()))
        with torch.no_grad():
            objective.prototypes.weight.copy_(plain.prototypes)
        for first, second in views(3):
            descend([*network.parameters(), *objective.parameters()], objective(network, first, second).loss, lr)
            descend(plain.parameters(), plain.loss(first, second), lr)
            with torch.no_grad():
                plain.prototypes.copy_(F.normalize(plain.prototypes))
        return float((F.normalize(objective.prototypes.weight) - plain.prototypes).norm())

    assert difference(1e-2) > 0
    assert difference(1e-3) < 0.02 * difference(1e-2)


def test_mocos_bank_starts_anew_with_random_directions():
    network, objective = built(CASES["mocov2"][0])
    torch.manual_seed(5)
    objective.before_fit(network, context())
    first = objective.bank.clone()
    close(first.norm(dim=1), torch.ones(BANK, dtype=torch.float64))
    for pair in views(2):
        objective(network, *pair).loss.backward()
    assert not torch.equal(objective.bank, first)
    torch.manual_seed(5)
    objective.before_fit(network, context())
    assert torch.equal(objective.bank, first)
    assert int(objective.place) == 0
    objective.before_fit(network, context())
    assert not torch.equal(objective.bank, first)


@pytest.mark.parametrize(
    "batches", [[6, 6, 6, 2, 6, 4], [20, 3], [25, 5]], ids=["around the end", "all at once", "more"]
)
def test_mocos_bank_and_loss_are_lightlys(batches):
    _, objective = built(CASES["mocov2"][0])
    reference = NTXentLoss(0.2, memory_bank_size=(BANK, OUT)).double()
    objective.before_fit(tiny_encoder((6,)).double(), context())
    reference.memory_bank.bank.copy_(objective.bank)
    reference.memory_bank.bank_ptr.zero_()
    for size in batches:
        queries, keys = torch.randn(2, size, OUT, dtype=torch.float64)
        queries.requires_grad_()
        losses = objective._loss(queries, keys), reference(queries, keys)
        close(*losses)
        close(*(torch.autograd.grad(loss, queries)[0] for loss in losses))
        close(objective.bank, reference.memory_bank.bank)
        assert int(objective.place) == int(reference.memory_bank.bank_ptr)


def test_a_bank_larger_than_the_data_is_refused():
    network, objective = built(CASES["mocov2"][0])
    objective.before_fit(network, context(BANK))
    message = (
        r"client 4, round 2: MoCo's memory bank of 20 keys is larger than the client's 19 training samples.*set bank"
    )
    with pytest.raises(ConfigurationError, match=message):
        objective.before_fit(network, context(BANK - 1))


def test_more_groups_than_samples_are_refused():
    network, objective = built(CASES["smog"][0])
    message = r"client 4, round 2: SMoG looks for 4 groups in the client's 3 training samples; set groups"
    with pytest.raises(ConfigurationError, match=message):
        objective.before_fit(network, context(GROUPS - 1))
    network, objective = built(partial(CASES["smog"][0], share_groups=True))
    objective.before_fit(network, context(GROUPS - 1))


def test_groups_start_as_directions_of_clusters_of_the_clients_projections():
    """As many groups as samples: every projection is a cluster of its own."""
    network, objective = built(CASES["smog"][0])
    data = context(GROUPS)
    objective.projector.layers[1].running_mean.sub_(0.3)  # is used, and stays as it is
    before = {name: tensor.clone() for name, tensor in objective.projector.state_dict().items()}
    objective.before_fit(network, data)
    projections = F.normalize(objective.projector.eval()(network(data.data.inputs)), dim=1)
    groups = objective.groups.group_features
    cosines = groups @ projections.T
    close(cosines.amax(1), torch.ones(GROUPS, dtype=torch.float64))
    assert sorted(cosines.argmax(1).tolist()) == list(range(GROUPS))
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.projector.state_dict().items())


def test_groups_are_not_sought_in_what_is_not_finite():
    network, objective = built(CASES["smog"][0])
    with torch.no_grad():
        network[0].weight.fill_(float("nan"))
    with pytest.raises(ClientError, match=r"client 4, round 2: the projections .* are not finite"):
        objective.before_fit(network, context())
    assert objective.projector.training


def test_groups_move_as_lightlys():
    _, objective = built(CASES["smog"][0])
    [(projections, _)] = views(1)
    projections = projections[:, :OUT].requires_grad_()
    got, expected = objective._moved(projections), objective.groups.get_updated_group_features(projections)
    close(got, expected)
    weights = torch.randn(GROUPS, OUT, dtype=torch.float64)
    gradients = [torch.autograd.grad((moved * weights).sum(), projections)[0] for moved in (got, expected)]
    assert gradients[0].any()
    close(*gradients)


def test_groups_that_are_shared_are_state_and_others_are_not():
    _, own = built(CASES["smog"][0])
    _, shared = built(partial(CASES["smog"][0], share_groups=True))
    assert set(shared.state_dict()) - set(own.state_dict()) == {"groups.group_features"}
    assert set(shared.shared) - set(own.shared) == {"groups.*"}


ARGUMENTS = [
    (SimCLR, {"temperature": 0.0}, "temperature must be a finite number above 0"),
    (SimCLR, {"hidden": 0}, "hidden must be at least 1"),
    (SimCLR, {"out": 0}, "out must be at least 1"),
    (BYOL, {"momentum": 1.1}, "momentum must be at most 1"),
    (BYOL, {"momentum": -0.1}, "momentum must be a finite number of at least 0"),
    (SimSiam, {"predictor_hidden": 0}, "predictor_hidden must be at least 1"),
    (MoCoV2, {"bank": 0}, "bank must be at least 1"),
    (MoCoV2, {"temperature": -1.0}, "temperature must be a finite number above 0"),
    (SwAV, {"prototypes": 0}, "prototypes must be at least 1"),
    (SwAV, {"epsilon": 0.0}, "epsilon must be a finite number above 0"),
    (SwAV, {"iterations": 0}, "iterations must be at least 1"),
    (SMoG, {"groups": 0}, "groups must be at least 1"),
    (SMoG, {"beta": 1.5}, "beta must be at most 1"),
]


@pytest.mark.parametrize(("objective", "options", "message"), ARGUMENTS)
def test_arguments_without_meaning_are_refused(objective, options, message):
    with pytest.raises(ValueError, match=message):
        objective(tiny_encoder((6,)), **options)


def test_the_base_is_no_objective():
    with pytest.raises(NotImplementedError):
        Objective(tiny_encoder((6,)))(None, None, None)
