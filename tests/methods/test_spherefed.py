"""SphereFed (Dong et al. 2022) against plain torch: a fixed orthonormal classifier, and least squares at the end."""

from functools import partial
from typing import ClassVar

import lightning as L
import pytest
import torch
from _helpers.plain import batches, copy_of, mean_of, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    quiet_trainer,
    run,
    tiny_encoder,
    whole_state,
    wide_encoder,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.client import FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import SphereFed
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, WIDTH = 2, 0.2, 7
COHORTS = [[0, 2, 3], [1, 2]]
EVERYBODY = list(range(CLIENTS))
METHOD = partial(SphereFed, lr=LR, epochs=EPOCHS)


def first_encoder() -> nn.Module:
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    return wide_encoder((INPUTS,))


def squared_error(directions):
    """The mean over samples and classes, sample by sample, on points of length one."""

    def loss(encoder, inputs, labels):
        total = 0.0
        for f, y in zip(encoder(inputs), labels.tolist(), strict=True):
            z = f / f.square().sum().sqrt()
            total = total + sum((w @ z - float(c == y)) ** 2 for c, w in enumerate(directions))
        return total / (len(labels) * CLASSES)

    return loss


def restate(data, directions, cohorts):
    net = first_encoder()
    for round, cohort in enumerate(cohorts):
        trained = []
        for client in cohort:
            local = copy_of(net)
            steps = batches(data, client, round, "fit/0", EPOCHS)
            sgd(local, steps, list(local.parameters()), LR, squared_error(directions))
            trained.append(named(local))
        put(net, mean_of(trained, [len(data.labels[client]) for client in cohort]))
    return net


def test_two_rounds_equal_the_restatement():
    data = Toy()
    federation = run(METHOD, 2, cohorts=COHORTS, data=data, encoder=wide_encoder)
    model = federation.client_model(4)
    directions = model.head.weight.detach()
    expected = restate(data, directions, COHORTS)
    assert_same(named(model.encoder), named(expected), atol=1e-6)
    inputs, labels = data.tensors(4, "test")
    with torch.no_grad():
        scores = expected(inputs) / expected(inputs).norm(dim=1, keepdim=True) @ directions.T
    assert federation.test_scores[4].accuracy == pytest.approx(float((scores.argmax(1) == labels).float().mean()))
    assert federation.test_scores[4].loss == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), abs=1e-5)


def test_the_classifier_is_orthonormal_and_never_changes():
    first = run(METHOD, 1, encoder=wide_encoder, limit_val_batches=0).client_model(0).head.weight
    later = run(METHOD, 3, cohorts=COHORTS, encoder=wide_encoder).client_model(1).head.weight
    assert torch.equal(first, later)
    torch.testing.assert_close(later @ later.T, torch.eye(CLASSES), rtol=0, atol=1e-6)
    other = run(METHOD, 1, encoder=wide_encoder, seed=SEED + 1).client_model(0).head.weight
    assert not torch.allclose(first, other, atol=1e-2)


def pooled(encoder, data, clients):
    """Points on the sphere and one-hot classes of all samples of some clients, in double precision."""
    samples = [data.tensors(client) for client in clients]
    features = encoder(torch.cat([inputs for inputs, _ in samples])).detach().double()
    return features / features.norm(dim=1, keepdim=True), torch.eye(CLASSES).double()[
        torch.cat([y for _, y in samples])
    ]


@pytest.mark.parametrize("engine", [None, TrainerEngine, VectorizedEngine])
def test_the_calibrated_classifier_is_the_least_squares_of_everybodys_features(engine):
    data, cohorts = Toy(), [*COHORTS, EVERYBODY]
    method = partial(METHOD, calibrate=True)
    engine = engine and engine()
    federation = run(method, 3, cohorts=cohorts, data=data, encoder=wide_encoder, engine=engine)
    before = run(METHOD, 2, cohorts=COHORTS, encoder=wide_encoder)
    model = federation.client_model(4)
    assert_same(named(model.encoder), named(before.client_model(4).encoder), atol=1e-5)  # nothing trained
    points, onehot = pooled(model.encoder, data, EVERYBODY)
    expected = torch.linalg.lstsq(points, onehot).solution.T
    torch.testing.assert_close(model.head.weight.detach().double(), expected, rtol=0, atol=2e-3)
    residual = (points @ model.head.weight.detach().double().T - onehot).square().sum()
    assert float(residual) == pytest.approx(float((points @ expected.T - onehot).square().sum()), rel=1e-5)


def test_in_double_precision_it_is_exact():
    data = Toy()
    method = partial(METHOD, calibrate=True)
    federation = run(method, 2, data=data, encoder=wide_encoder, precision="64-true")
    model = federation.client_model(0)
    onehot = torch.eye(CLASSES).double()[torch.cat([data.tensors(k)[1] for k in EVERYBODY])]
    points = model.encoder(torch.cat([data.tensors(k)[0] for k in EVERYBODY]).double()).detach()
    points = points / points.norm(dim=1, keepdim=True)
    expected = torch.linalg.lstsq(points, onehot).solution.T
    torch.testing.assert_close(model.head.weight.detach(), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("projection", [None, 6])
def test_features_in_half_precision_are_calibrated(projection):
    method = partial(METHOD, calibrate=True, projection=projection)
    federation = run(method, 2, encoder=wide_encoder, precision="bf16-mixed")
    head = federation.client_model(0).head.weight
    assert torch.equal(head, federation.server.head)
    assert bool(head.isfinite().all())
    assert not torch.equal(head, federation.clients.first_state(0)["head.weight"])


def test_fewer_samples_than_features_give_the_classifier_of_least_norm():
    data = Toy(labels=[[0], [1, 2]])
    method = partial(METHOD, calibrate=True)
    federation = run(method, 1, cohorts=[[0, 1]], data=data, encoder=wide_encoder)
    model = federation.client_model(0)
    points, onehot = pooled(model.encoder, data, [0, 1])
    expected = torch.linalg.lstsq(points, onehot, driver="gelsd").solution.T
    torch.testing.assert_close(model.head.weight.detach().double(), expected, rtol=0, atol=1e-2)
    assert float(model.head.weight.detach().norm()) == pytest.approx(float(expected.norm()), rel=1e-2)


def test_a_calibration_sends_its_statistics_alone():
    loop = GivenCohorts([0, 3])
    run(partial(METHOD, calibrate=True), 1, loop=loop, encoder=wide_encoder, limit_val_batches=0)
    encoder = 4 * sum(p.numel() for p in wide_encoder((INPUTS,)).parameters())
    assert loop.traffic.down == {"weights": 2 * encoder}
    assert {kind: size for kind, size in loop.traffic.up.items() if size} == {
        "statistics": 2 * 4 * (WIDTH * WIDTH + WIDTH * CLASSES)
    }


def test_training_goes_on_under_the_fixed_classifier():
    federation = run(partial(METHOD, calibrate=True), 2, encoder=wide_encoder)
    server, fixed = federation.server, federation.clients.first_state(0)["head.weight"]
    assert torch.equal(server.broadcast(0, 1).head, server.head)
    assert server.broadcast(0, 2).head is None
    assert not torch.allclose(server.head, fixed, atol=1e-1)
    first = run(METHOD, 1, encoder=wide_encoder, limit_val_batches=0)
    assert torch.equal(fixed, first.client_model(0).head.weight)


class _SeesItsHead(SphereFed):
    seen: ClassVar[list[torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.head.weight.detach().clone())
        return super().training_step(batch, batch_idx)


def test_another_fit_trains_under_the_fixed_classifier_too():
    federation = run(partial(_SeesItsHead, lr=LR, epochs=1, calibrate=True), 2, encoder=wide_encoder)
    fixed = federation.clients.first_state(0)["head.weight"]
    _SeesItsHead.seen.clear()
    quiet_trainer(3, GivenCohorts(range(CLIENTS)), limit_val_batches=0).fit(federation, datamodule=Toy())
    assert _SeesItsHead.seen
    assert all(torch.equal(head, fixed) for head in _SeesItsHead.seen)
    assert int(federation.server.calibrated) == 2


def test_the_classifier_of_an_encoder_that_has_changed_is_not_sent():
    federation = run(partial(METHOD, calibrate=True), 3, encoder=wide_encoder)
    server = federation.server
    quiet_trainer(2, GivenCohorts([0, 1]), _StopsAfterARound()).fit(federation, datamodule=Toy())
    assert server.broadcast(0, 1).head is None


class _StopsAfterARound(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_calibrated_run_that_is_killed_goes_on_exactly(tmp_path, epoch):
    """After its first round, and after the calibration with another round to come."""
    method, options = partial(METHOD, calibrate=True), {"cohorts": COHORTS, "encoder": wide_encoder}
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    keeping = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    whole = run(method, 3, callbacks=[saver], **options, **keeping)
    rounds = 3 if epoch == 0 else 4
    resumed = run(method, rounds, ckpt_path=str(tmp_path / f"epoch={epoch}.ckpt"), **options, **keeping)
    if epoch == 0:
        assert_same(whole_state(resumed), whole_state(whole))
    else:  # the encoder is the same, and the cohort of the last round another
        assert_same(named(resumed.client_model(0).encoder), named(whole.client_model(0).encoder))
        assert not torch.equal(resumed.server.head, whole.server.head)


def test_novel_clients_get_the_calibrated_classifier():
    data = Toy(novel_clients=2)
    participants = range(CLIENTS - 2)
    federation = run(partial(METHOD, calibrate=True), 2, cohorts=[participants], data=data, encoder=wide_encoder)
    assert torch.equal(federation.client_model(data.novel[0]).head.weight, federation.server.head)


def test_a_projection_makes_room_for_the_classes():
    with pytest.raises(
        ConfigurationError, match=r"got 4 features and 5 classes: use a wider encoder, or set projection=5"
    ):
        SphereFed(tiny_encoder((INPUTS,)), CLASSES)
    client = SphereFed(tiny_encoder((INPUTS,)), CLASSES, projection=6)
    assert {"projection.weight", "projection.bias"} < set(client.shared_names())
    assert client.personal_names() == []
    points = client.head_input(client.encoder(torch.randn(3, INPUTS)))
    assert points.shape == (3, 6)
    torch.testing.assert_close(points.norm(dim=1), torch.ones(3))


def test_a_calibration_needs_to_know_the_last_round():
    client = SphereFed(wide_encoder((INPUTS,)), CLASSES, calibrate=True)
    with pytest.raises(ConfigurationError, match="the last of which calibrates: set the Trainer's max_epochs"):
        client.before_fit(FitContext(0, 0, FitData(part=None, batch_size=4)))
    with pytest.raises(ConfigurationError, match='needs eval_model="aggregated"'):
        SphereFed(wide_encoder((INPUTS,)), CLASSES, calibrate=True, eval_model="trained")
    with pytest.raises(ValueError, match="projection must be at least 1"):
        SphereFed(wide_encoder((INPUTS,)), CLASSES, projection=0)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_calibration_in_half_precision_keeps_small_eigenvalues(precision):
    def encoder(input_shape):
        made = nn.Sequential(nn.Linear(input_shape[0], 128), nn.Tanh())
        made.out_features = 128
        return made

    fit = partial(SphereFed, calibrate=True, lr=1.0)
    half, single = (run(fit, 3, encoder=encoder, precision=of) for of in (precision, "32-true"))
    norms = [float(found.server.head.float().norm()) for found in (half, single)]
    assert norms[0] == pytest.approx(norms[1], rel=0.2)
    accuracies = [sum(score.accuracy for score in found.test_scores.values()) / CLIENTS for found in (half, single)]
    assert accuracies[0] > accuracies[1] - 0.1
