"""DualFed's parts: the projector, the prediction, what is frozen in which stage, what travels, and arguments."""

import math
from functools import partial

import pytest
import torch
from _helpers.toy import CLIENTS, FEATURES, GivenCohorts, Toy, normed_encoder, run, tiny_encoder
from torch import nn
from torch.nn import functional as F

from pfl_lightning import Federation, SequentialEngine, TrainerEngine
from pfl_lightning.encoders.mlp import make_projector
from pfl_lightning.methods import DualFed

PARTS = ("encoder", "projector", "head", "global_head")

# ---------------------------------------------------------------------- the projector


@pytest.mark.parametrize(
    ("depth", "norm", "expected"),
    [
        (1, True, ["512-512", "BatchNorm1d"]),
        (2, True, ["512-256", "ReLU", "BatchNorm1d", "256-512", "BatchNorm1d"]),
        (2, False, ["512-256", "ReLU", "256-512"]),
        (3, True, ["512-256", "ReLU", "BatchNorm1d", "256-256", "ReLU", "BatchNorm1d", "256-512", "BatchNorm1d"]),
    ],
)
def test_layers(depth, norm, expected):
    layers = make_projector(512, 256, depth, norm)
    found = [f"{m.in_features}-{m.out_features}" if isinstance(m, nn.Linear) else type(m).__name__ for m in layers]
    assert found == expected


def test_the_default_is_the_papers():
    encoder = nn.Identity()
    encoder.out_features = 512
    client = DualFed(encoder, 7)
    assert str(client.projector) == str(make_projector(512, 256, 2, True))
    assert (client.contrastive, client.temperature, client.lr, client.momentum) == (40.0, 0.2, 0.01, 0.5)
    assert (client.epochs, client.stages, client.prediction) == (1, "stage-wise", "probabilities")


@pytest.mark.parametrize("training", [True, False])
def test_a_projection_written_out(training):
    projector = make_projector(4, 3, 2, True)
    generator = torch.Generator().manual_seed(3)
    for tensor in (*projector.parameters(), projector[2].running_mean, projector[4].running_mean):
        tensor.data.normal_(generator=generator)
    for layer in (projector[2], projector[4]):
        layer.running_var.uniform_(0.5, 2.0, generator=generator)
    inputs = torch.randn(6, 4, generator=generator)

    def normalized(values, layer):
        columns = []
        for j in range(values.shape[1]):
            mean, variance = layer.running_mean[j], layer.running_var[j]
            if training:
                mean = sum(values[:, j]) / len(values)
                variance = sum((value - mean) ** 2 for value in values[:, j]) / len(values)
            columns.append((values[:, j] - mean) / (variance + 1e-5).sqrt() * layer.weight[j] + layer.bias[j])
        return torch.stack(columns, dim=1)

    with torch.no_grad():
        hidden = normalized((inputs @ projector[0].weight.T + projector[0].bias).clamp(min=0), projector[2])
        expected = normalized(hidden @ projector[3].weight.T + projector[3].bias, projector[4])
        torch.testing.assert_close(projector.train(training)(inputs), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- the prediction


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("global_on", ["encoder", "projector"])
def test_both_classifiers_are_added(global_on, dtype):
    torch.manual_seed(4)
    clients = {
        name: DualFed(tiny_encoder((6,)), 5, prediction=name, global_on=global_on).to(dtype).eval()
        for name in ("probabilities", "logits")
    }
    clients["logits"].load_state_dict(clients["probabilities"].state_dict())
    inputs = torch.randn(3, 6, dtype=dtype)
    with torch.no_grad():
        client = clients["probabilities"]
        z = client.encoder(inputs)
        u = client.projector(z)
        personal, general = client.head(u), client.global_head(z if global_on == "encoder" else u)
        for row, p, g in zip(client(inputs).tolist(), personal.tolist(), general.tolist(), strict=True):
            sums = [sum(map(math.exp, scores)) for scores in (p, g)]
            expected = [
                math.log((math.exp(a) / sums[0] + math.exp(b) / sums[1]) / 2) for a, b in zip(p, g, strict=True)
            ]
            assert row == pytest.approx(expected, abs=1e-6 if dtype == torch.float32 else 1e-14)
        assert torch.equal(clients["logits"](inputs), personal + general)


def test_probabilities_of_certain_classifiers_are_finite():
    """Scores whose probabilities are zero in single precision."""
    client = DualFed(tiny_encoder((6,)), 3).eval()
    client.head = nn.Linear(FEATURES, 3)
    for head, scores in ((client.head, [500.0, 0.0, -500.0]), (client.global_head, [0.0, 300.0, -500.0])):
        head.weight.data.zero_()
        head.bias.data = torch.tensor(scores)
    found = client(torch.zeros(1, 6))
    torch.testing.assert_close(found, torch.tensor([[-math.log(2), -math.log(2), -800 - math.log(2)]]))
    assert bool(F.cross_entropy(found, torch.tensor([2])).isfinite())


# ---------------------------------------------------------------------- what is frozen


class OneStage(DualFed):
    """The first or the second alone."""

    def __init__(self, *args, stage, **options):
        super().__init__(*args, **options)
        self.stage = stage

    def phases(self):
        return (super().phases()[self.stage],)


@pytest.mark.parametrize("global_on", ["encoder", "projector"])
@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize(("stage", "trained"), [(0, {"encoder", "projector", "head"}), (1, {"global_head"})])
def test_what_is_frozen_does_not_change(stage, trained, engine, global_on):
    """Neither its weights nor the running statistics of its batch normalization; all of the rest does."""
    fit = partial(OneStage, stage=stage, personal=PARTS, global_on=global_on, lr=0.05)
    options = {"encoder": normed_encoder, "data": Toy(batch_size=9), "engine": engine()}
    federation = run(fit, cohorts=[[0]], **options)
    before, after = federation.client_model(1).state_dict(), federation.client_model(0).state_dict()
    assert any("running_var" in name for name in before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == (name.split(".")[0] not in trained), name


# ---------------------------------------------------------------------- what travels


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, {"encoder", "global_head"}),
        ({"personal": ("projector", "head", "global_head")}, {"encoder"}),
        ({"personal": ("head",)}, {"encoder", "projector", "global_head"}),
        ({"personal": ()}, set(PARTS)),
        ({"personal": PARTS}, set()),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",
)
def test_parameters_of_shared_parts_travel_and_running_statistics_stay(options, shared):
    loop = GivenCohorts([0, 1], [4])
    federation = run(
        partial(DualFed, **options), 2, loop=loop, encoder=normed_encoder, data=Toy(batch_size=9), limit_val_batches=0
    )
    parameters = {n: p for n, p in federation.client_model(0).named_parameters() if n.split(".")[0] in shared}
    assert set(federation.server.broadcast(0, 2).weights) == set(parameters)
    size = sum(p.numel() * 4 for p in parameters.values())
    assert loop.traffic.up == loop.traffic.down == ({"weights": 3 * size} if size else {})


def test_every_client_counts_the_same():
    """Whatever their sizes (11 and 17 samples): the plain mean (11)."""
    fit = partial(DualFed, eval_model="trained", lr=0.02)
    federation = run(fit, cohorts=[[0, 1]], encoder=normed_encoder, data=Toy(batch_size=9))
    for name, sent in federation.server.broadcast(0, 1).weights.items():
        first, second = (federation.client_model(client).state_dict()[name] for client in (0, 1))
        torch.testing.assert_close(sent, (first + second) / 2)
        assert not torch.equal(first, second)


def test_own_statistics_serve_the_evaluation():
    federation: Federation = run(DualFed, encoder=normed_encoder, data=Toy(batch_size=9))
    states = [federation.client_model(client).state_dict() for client in range(CLIENTS)]
    assert all(torch.equal(state["encoder.1.weight"], states[0]["encoder.1.weight"]) for state in states)
    assert len({tuple(state["encoder.1.running_mean"].tolist()) for state in states}) == CLIENTS


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contrastive": -1.0}, r"contrastive \(lambda\) must be a finite number of at least 0, got -1.0"),
        ({"contrastive": float("nan")}, r"contrastive \(lambda\) must be a finite number of at least 0, got nan"),
        ({"temperature": 0.0}, r"temperature \(tau\) must be a finite number above 0"),
        ({"temperature": float("inf")}, r"temperature \(tau\) must be a finite number above 0"),
        ({"projector_depth": 0}, "projector_depth must be at least 1, got 0"),
        ({"projector_hidden": 0}, "projector_hidden must be at least 1, got 0"),
        ({"stages": "both"}, "stages must be one of"),
        ({"stages": "simultaneous", "stage2_mode": "training"}, 'stages="simultaneous" does not have: leave one'),
        ({"prediction": "votes"}, "prediction must be one of"),
        ({"personal": ("classifier",)}, "personal must be one of"),
        ({"personal": "head"}, "personal must be"),
        ({"global_on": "head"}, "global_on must be one of"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DualFed(tiny_encoder((6,)), 5, **options)
