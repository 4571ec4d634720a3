"""VectorizedEngine gives what SequentialEngine gives, for every method and whatever clients differ in."""

from functools import partial

import pytest
import torch
from _helpers.methods import EVERY_METHOD
from _helpers.toy import (
    CLIENTS,
    FEATURES,
    Toy,
    assert_same,
    dropout_encoder,
    for_toy,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
)
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines import FitEnvironment
from pfl_lightning.methods import DualFed, FedAvg, FedBN, FedClassAvg, FedGH, FedPAC, FedProto, FedProx, FedRep

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")

COHORTS = [[0, 2, 3], [1, 2]]  # of clients with 3, 5, 4, 4 and 2 batches, the last ones incomplete
StepLR = torch.optim.lr_scheduler.StepLR


def assert_vectorized(federation):
    """Nothing fell back to SequentialEngine."""
    assert not federation.engine.groups.reasons
    assert not federation.engine._warned


def assert_agree(
    fit, rounds=2, *, atol=1e-5, clip=None, group=32, cache=True, forward="vmap", cohorts=COHORTS, **options
):
    """Train under both engines and compare; returns the vectorized federation."""
    both = {"cache_features": cache, **(clip or {})}
    engines = VectorizedEngine(group, forward=forward, **both), SequentialEngine(**both)
    got, expected = (run(fit, rounds, engine=engine, cohorts=cohorts, **options) for engine in engines)
    assert_vectorized(got)
    assert_same(whole_state(got), whole_state(expected), atol=atol)
    for client, score in expected.test_scores.items():  # of scores that are made single
        assert got.test_scores[client].loss == pytest.approx(score.loss, abs=max(100 * atol, 1e-6), nan_ok=True)
    return got


@pytest.mark.slow  # test_every_engine.py has it of every method, and the next test of the core with nothing fallen back
@EVERY_METHOD
@pytest.mark.parametrize("rounds", [1, 2])
def test_every_method_agrees(method, rounds):
    assert_agree(for_toy(method, lr=0.01, epochs=2), rounds)


@pytest.mark.repeated
@EVERY_METHOD
def test_every_method_agrees_in_double_precision(method):
    """Up to rounding, which steep losses would enlarge in single precision."""
    assert_agree(for_toy(method, lr=0.02, epochs=3), cohorts=[range(CLIENTS)], atol=1e-8, precision="64-true")


def test_on_a_cpu_only_small_models_without_convolutions_are_trained_together():
    environment = FitEnvironment()
    for encoder, expected in ((nn.Linear(4, 4), True), (nn.Conv2d(1, 4, 3), False), (nn.Linear(20_000, 4), False)):
        encoder.out_features = 4
        client = FedAvg(encoder, 3)
        assert VectorizedEngine().vectorizes(client, environment) is expected
        assert VectorizedEngine().vectorizes(client, environment) is expected
        assert VectorizedEngine(forward="vmap").vectorizes(client, environment)
        on_gpu = FitEnvironment(device=torch.device("cuda"))
        assert VectorizedEngine().vectorizes(client, on_gpu)
        assert VectorizedEngine().vectorizes(client, on_gpu)


def wide_encoder(input_shape):
    """Too large to be worth it on a CPU."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], 9000), nn.Linear(9000, FEATURES))
    encoder.out_features = FEATURES
    return encoder


def test_other_models_are_trained_on_a_cpu_as_by_fabric_fit():
    engine = VectorizedEngine()
    got, expected = (whole_state(run(FedAvg, encoder=wide_encoder, engine=e)) for e in (engine, SequentialEngine()))
    assert_same(got, expected)


OPTIMIZERS = {
    "plain": partial(torch.optim.SGD, lr=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "not known to be elementwise": partial(torch.optim.NAdam, lr=0.01),
}


# A constant rate is what each of them has in the first epoch of a schedule.
@pytest.mark.repeated
@pytest.mark.parametrize(
    "scheduler",
    [pytest.param(None, marks=pytest.mark.slow), partial(StepLR, step_size=1, gamma=0.5)],
    ids=["constant", "scheduled"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_and_schedules_agree(optimizer, scheduler):
    """A client with fewer batches lowers its rate earlier, and stays as it is when it has finished."""
    assert_agree(partial(FedAvg, epochs=3, optimizer=optimizer, lr_scheduler=scheduler), atol=1e-6, precision="64-true")


class StepSchedule(FedAvg):
    """Cycles rate and momentum with every step, and treats weights and biases apart."""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02], total_steps=50)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_groups_by_shape_and_schedules_by_step_agree():
    assert_agree(StepSchedule)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_each_clients_own(algorithm):
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    assert_agree(partial(FedPAC, lr=0.05), clip=clip)


@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cached", "fresh"])
@pytest.mark.parametrize(
    "fit",
    [FedPAC, FedBN, partial(DualFed, contrastive=1.0), partial(FedAvg, fine_tune="head"), FedRep],
    ids=["FedPAC", "FedBN", "DualFed", "FedAvg-FT", "FedRep"],
)
@pytest.mark.parametrize(
    ("precision", "batch_size", "rounds", "atol"), [("32-true", 11, 1, 1e-5), ("64-true", 9, 2, 1e-9)]
)
def test_batch_normalization_agrees(fit, cache, precision, batch_size, rounds, atol):
    """Batches of two samples (of size 9, the last ones) have small variances, which enlarge rounding."""
    options = {"encoder": normed_encoder, "data": Toy(batch_size=batch_size), "precision": precision}
    got = assert_agree(partial(fit, lr=0.005, epochs=rounds), rounds, cache=cache, atol=atol, **options)
    counts = {int(got.client_model(c).encoder[1].num_batches_tracked) for c in (0, 1)}
    assert counts != {0}


@pytest.mark.parametrize("method", [FedProto, FedGH, FedClassAvg])
def test_several_encoders_agree(method):
    encoders = [tiny_encoder, linear_encoder]
    cohorts = [range(CLIENTS), [0, 1, 3]]
    assert_agree(partial(method, lr=0.01, epochs=1), cohorts=cohorts, encoder=encoders)


def test_warm_up_of_first_rounds_agrees():
    """Some clients have two phases in the second round and others one."""
    assert_agree(partial(FedClassAvg, warm_up_epochs=2, lr=0.01), cohorts=[[0, 2], range(CLIENTS)])


@pytest.mark.parametrize("group", [2, 3])
def test_small_groups_agree(group):
    assert_agree(partial(FedProx, mu=0.5, lr=0.05), cohorts=[range(CLIENTS)], group=group)


@pytest.mark.parametrize("drop_last", [True, False])
def test_dropped_last_batches_agree(drop_last):
    assert_agree(partial(FedAvg, lr=0.05), data=Toy(drop_last=drop_last))


class HeadAlone(FedAvg):
    """Everything has gradients; the optimizer holds, and the clipping sees, the head."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.5)


def test_an_optimizer_of_some_parameters_agrees():
    assert_agree(HeadAlone, clip={"gradient_clip_val": 0.1})


class Unused(FedAvg):
    """Has a part that no loss reaches: it must feel no weight decay."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.spare = nn.Linear(FEATURES, 2)


def test_what_no_loss_reaches_stays_as_it_is():
    got = assert_agree(partial(Unused, lr=0.05, weight_decay=0.5))
    start = run(partial(Unused, lr=1e-9), 1, cohorts=[[4]], engine=SequentialEngine())
    assert torch.equal(got.client_model(0).spare.weight, start.client_model(0).spare.weight)


class Counts(FedAvg):
    """A buffer that a step assigns, and one that it changes; the loss depends on both, and on the batch's number."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("assigned", torch.ones(()))
        self.register_buffer("changed", torch.ones(()))

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.changed.mul_(1.1)
        output["loss"] = output["loss"] * self.assigned / self.changed * (1 + batch_idx % 2)
        self.assigned = self.assigned * 0.9
        return output


def test_own_buffers_and_batch_numbers_agree():
    assert_agree(type("Own", (Counts,), {"shared": ("encoder.*",)}))


def test_losses_agree():
    losses = []
    for engine in (SequentialEngine(), VectorizedEngine()):
        federation = run(FedPAC, 2, cohorts=[range(CLIENTS)], engine=engine)
        losses.append({k: float(v) for k, v in federation.trainer.callback_metrics.items() if "train/" in k})
    assert losses[0].keys() == losses[1].keys() >= {"train/loss", "train/cross_entropy", "train/alignment"}
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_bfloat16_is_near():
    options = {"precision": "bf16-mixed", "cohorts": [range(CLIENTS)]}
    got = run(partial(FedPAC, lr=0.05), 2, engine=VectorizedEngine(), **options)
    expected = run(partial(FedPAC, lr=0.05), 2, engine=SequentialEngine(), **options)
    exact = run(partial(FedPAC, lr=0.05), 2, engine=SequentialEngine(), cohorts=[range(CLIENTS)])
    assert_vectorized(got)
    assert_same(whole_state(got), whole_state(expected), atol=2e-2)
    assert any(not torch.equal(t, whole_state(exact)[n]) for n, t in whole_state(got).items())


def test_every_client_has_its_own_dropout():
    """Clients with the same data and the same start draw differently, and the same in every run."""

    def go(seed=1):
        def equal(inputs, targets):
            inputs.fill_(1.0)

        data = Toy([[0] * 8] * 3, batch_size=8, change=equal)
        fit = type("Personal", (FedAvg,), {"shared": ()})
        return run(fit, 1, data=data, cohorts=[range(3)], encoder=dropout_encoder, engine=VectorizedEngine(), seed=seed)

    got, again, other = go(), go(), go(seed=2)
    assert_vectorized(got)
    weights = [got.personal.get(client)["encoder.0.weight"] for client in range(3)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert_same(whole_state(got), whole_state(again))
    assert not torch.equal(weights[0], other.personal.get(0)["encoder.0.weight"])
