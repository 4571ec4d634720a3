"""Every objective against its restatement in plain torch."""

import pytest
import torch
from _helpers.plain_objectives import (
    PlainBYOL,
    PlainBYOLByDistances,
    PlainMoCo,
    PlainSimCLR,
    PlainSimCLRApart,
    PlainSimSiam,
    PlainSMoG,
    PlainSwAV,
    descend,
)
from _helpers.small_objectives import BATCH, OUT, SMALL, built, close, context, views
from _helpers.toy import normed_encoder, tiny_encoder
from torch import nn

from pfl_lightning.self_supervised import OBJECTIVES, MoCoV2, SMoG, SwAV

LR = 0.1


RESTATED = {
    "simclr": PlainSimCLR,
    "simclr, views apart": PlainSimCLRApart,
    "byol": PlainBYOL,
    "byol without normalization": PlainBYOL,
    "byol by distances": PlainBYOLByDistances,
    "simsiam": PlainSimSiam,
    "mocov2": PlainMoCo,
    "swav": PlainSwAV,
    "smog": PlainSMoG,
}
TOGETHER = ("simclr", "swav")  # in the others batch normalization sees one view at a time
NAMES = pytest.mark.parametrize("name", SMALL)


def start(plain, objective):
    """State that the objective has made for this fit."""
    if isinstance(objective, MoCoV2):
        plain.start(objective.bank)
    elif isinstance(objective, SwAV):
        plain.start(objective.prototypes.weight)
    elif isinstance(objective, SMoG):
        plain.start(objective.groups.group_features)


@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder], ids=["plain", "with batch norm"])
@NAMES
def test_four_steps_equal_the_restatement(name, encoder):
    network, objective = built(SMALL[name], encoder)
    objective.before_fit(network, context())
    plain = RESTATED[name](network, objective)
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


@NAMES
def test_encodings_and_projections_are_those_of_the_clients_own_networks(name):
    network, objective = built(SMALL[name])
    objective.before_fit(network, context())
    [(first, second)] = views(1)
    output = objective(network, first, second)
    encoded = [network(view) for view in (first, second)]
    for got, expected in zip(output.encodings, encoded, strict=True):
        close(got, expected)
    apart = [objective.projector(view) for view in encoded]
    together = objective.projector(torch.cat(encoded)).chunk(2)
    for got, expected in zip(output.projections, together if name in TOGETHER else apart, strict=True):
        close(got, expected)
    assert [z.shape for z in output.encodings] == [(BATCH, 4)] * 2
    assert [p.shape for p in output.projections] == [(BATCH, OUT)] * 2
    assert all(tensor.requires_grad for tensor in (*output.encodings, *output.projections))


@NAMES
def test_all_parameters_train_and_nothing_else_has_a_gradient(name):
    network, objective = built(SMALL[name])
    objective.before_fit(network, context())
    [(first, second)] = views(1)
    objective(network, first, second).loss.backward()
    named = dict(objective.named_parameters())
    assert {name.split(".")[0] for name in named} <= {"projector", "predictor", "prototypes"}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*named.values(), *network.parameters()))
    assert not any(buffer.requires_grad for buffer in objective.buffers())


# Linear layers, and whether each is followed by normalization, as the papers have them.
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
