"""Details of single objectives: prototypes, memory bank, groups; and refused arguments."""

from functools import partial

import pytest
import torch
from _helpers.plain_objectives import PlainSwAV, descend
from _helpers.small_objectives import BANK, GROUPS, OUT, SMALL, built, close, context, views
from _helpers.toy import normed_encoder, tiny_encoder
from lightly.loss import NTXentLoss
from torch.nn import functional as F

from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.self_supervised import BYOL, MoCoV2, Objective, SimCLR, SMoG, SwAV
from pfl_lightning.self_supervised.swav import SMALLEST_EPSILON


def test_swav_descends_as_the_published_code_up_to_the_second_order_of_the_learning_rate():
    """There the weights are divided by their length before every step."""

    def difference(lr):
        network, objective = built(SMALL["swav"])
        plain = PlainSwAV(network, objective)
        plain.start(F.normalize(objective.prototypes.weight.detach()))
        objective.before_fit(network, context())
        for first, second in views(3):
            descend([*network.parameters(), *objective.parameters()], objective(network, first, second).loss, lr)
            descend(plain.parameters(), plain.loss(first, second), lr)
            with torch.no_grad():
                plain.prototypes.copy_(F.normalize(plain.prototypes))
        return float((F.normalize(objective.prototypes.weight) - plain.prototypes).norm())

    assert difference(1e-2) > 0
    assert difference(1e-3) < 0.02 * difference(1e-2)


@pytest.mark.parametrize("name", ["mocov2", "smog"])
def test_a_loss_of_one_direction_has_no_gradient_for_the_other_view(name):
    """Nor by the statistics of batch normalization, in the encoder or in a head."""
    network, objective = built(SMALL[name], normed_encoder)
    objective.before_fit(network, context())
    [(first, second)] = views(1)
    first.requires_grad_()
    second.requires_grad_()
    gradients = torch.autograd.grad(objective(network, first, second).loss, (first, second), allow_unused=True)
    assert gradients[0].any()
    assert gradients[1] is None


def test_the_smallest_epsilon_of_swav_does_not_overflow():
    """Samples on every prototype, where the cosine is one."""
    network, objective = built(partial(SMALL["swav"], epsilon=SMALLEST_EPSILON))
    objective = objective.float()
    objective.before_fit(network, context())
    rows = objective.prototypes.weight.detach().repeat(100, 1)
    assert objective._loss(rows, rows).isfinite()
    objective.swapped.sinkhorn_epsilon = 0.01
    assert not objective._loss(rows, rows).isfinite()


def test_every_fit_starts_mocos_bank_with_random_directions():
    network, objective = built(SMALL["mocov2"])
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
    _, objective = built(SMALL["mocov2"])
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
    network, objective = built(SMALL["mocov2"])
    objective.before_fit(network, context(BANK))
    message = r"MoCo's memory bank of 20 keys is larger than the 19 training samples of client 4.*at most 19"
    with pytest.raises(ConfigurationError, match=message):
        objective.before_fit(network, context(BANK - 1))


def test_more_groups_than_samples_are_refused():
    network, objective = built(SMALL["smog"])
    message = r"SMoG looks for 4 groups in the 3 training samples of client 4; set groups to at most 3"
    with pytest.raises(ConfigurationError, match=message):
        objective.before_fit(network, context(GROUPS - 1))
    network, objective = built(partial(SMALL["smog"], share_groups=True))
    objective.before_fit(network, context(GROUPS - 1))


def test_groups_start_as_directions_of_clusters_of_the_clients_projections():
    """Groups as many as samples: every projection is a cluster of its own."""
    network, objective = built(SMALL["smog"])
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
    network, objective = built(SMALL["smog"])
    with torch.no_grad():
        network[0].weight.fill_(float("nan"))
    with pytest.raises(ClientError, match=r"client 4, round 3: the projections .* are not finite"):
        objective.before_fit(network, context())
    assert objective.projector.training


def test_groups_move_as_lightlys():
    _, objective = built(SMALL["smog"])
    [(projections, _)] = views(1)
    projections = projections[:, :OUT].requires_grad_()
    got, expected = objective._moved(projections), objective.groups.get_updated_group_features(projections)
    close(got, expected)
    weights = torch.randn(GROUPS, OUT, dtype=torch.float64)
    gradients = [torch.autograd.grad((moved * weights).sum(), projections)[0] for moved in (got, expected)]
    assert gradients[0].any()
    close(*gradients)


def test_groups_that_are_shared_are_state_and_others_are_not():
    _, own = built(SMALL["smog"])
    _, shared = built(partial(SMALL["smog"], share_groups=True))
    assert set(shared.state_dict()) - set(own.state_dict()) == {"groups.group_features"}
    assert set(shared.shared) - set(own.shared) == {"groups.*"}


ARGUMENTS = [
    (SimCLR, {"temperature": 0.0}, "temperature must be a finite number above 0"),
    (SimCLR, {"hidden": 0}, "hidden must be at least 1"),
    (SimCLR, {"out": 0}, "out must be at least 1"),
    (BYOL, {"momentum": 1.1}, "momentum must be between 0 and 1"),
    (BYOL, {"momentum": -0.1}, "momentum must be between 0 and 1"),
    (MoCoV2, {"bank": 0}, "bank must be at least 1"),
    (MoCoV2, {"temperature": -1.0}, "temperature must be a finite number above 0"),
    (SwAV, {"prototypes": 0}, "prototypes must be at least 1"),
    (SwAV, {"epsilon": 0.0}, "epsilon must be a finite number above 0"),
    (SwAV, {"epsilon": 0.01}, "epsilon must be at least 0.0125, got 0.01"),
    (SwAV, {"iterations": 0}, "iterations must be at least 1"),
    (SMoG, {"groups": 0}, "groups must be at least 1"),
    (SMoG, {"beta": 1.5}, "beta must be between 0 and 1"),
]


@pytest.mark.parametrize(("objective", "options", "message"), ARGUMENTS)
def test_arguments_without_meaning_are_refused(objective, options, message):
    with pytest.raises(ValueError, match=message):
        objective(tiny_encoder((6,)), **options)


def test_the_base_is_no_objective():
    with pytest.raises(NotImplementedError):
        Objective(tiny_encoder((6,)))(None, None, None)
