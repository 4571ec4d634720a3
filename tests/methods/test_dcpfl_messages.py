"""DC-PFL's messages: factors against matrices, their bytes, uploads that are refused, and arguments."""

import dataclasses
from functools import partial

import pytest
import torch
from _helpers.toy import FEATURES, GivenCohorts, Toy, assert_same, normed_encoder, run, tiny_encoder

from pfl_lightning.client import FitContext
from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import DCPFL, dcpfl

ROUND = 3


def build(**options):
    torch.manual_seed(0)
    client = DCPFL(tiny_encoder((6,)), 5, **({"server_lr": 0.1} | options))
    return client, client.configure_aggregator(5)


def upload(client, number, data=None):
    data = data or Toy()
    data.setup()
    return client.make_update(FitContext(number, ROUND, FitData(data.client_data(number).train, 4)), None)


def take(server, update):
    """Pass an update to the server, as a round does."""
    server.check(update)
    server.receive(update)


def state_of(server):
    return {name: tensor.clone() for name, tensor in server.state_dict().items()}


# ---------------------------------------------------------------------- factors and matrices


def test_factors_and_matrices_say_the_same(monkeypatch):
    """The pooled covariances, and with them the virtual features and the head."""
    seen = []

    def watch(statistics, *arguments):
        seen.append(statistics.covariances)
        return original(statistics, *arguments)

    original = dcpfl.sample_class_gaussians
    monkeypatch.setattr(dcpfl, "sample_class_gaussians", watch)
    heads = []
    for factors in (True, False):
        federation = run(partial(DCPFL, factors=factors, epochs=2, lr=0.05), 2, cohorts=[[0, 1, 3], [1, 2, 4]])
        heads.append(federation.server.broadcast(0, 2).weights)
    assert len(seen) == 4
    for by_factors, by_matrices in zip(seen[:2], seen[2:], strict=True):
        assert float(by_matrices.abs().max()) > 0.01
        torch.testing.assert_close(by_factors, by_matrices, rtol=0, atol=1e-5)
    assert_same(*heads, atol=1e-5)


def expected_bytes(labels, factors):
    """Single precision and 64-bit integers: means, classes, counts, then factors with their ranks, or matrices."""
    counts = [labels.count(c) for c in sorted(set(labels))]
    size = sum(FEATURES * 4 + 8 + 8 for _ in counts)
    if factors:
        return size + sum(min(n - 1, FEATURES) * FEATURES * 4 + 8 for n in counts)
    return size + len(counts) * FEATURES * FEATURES * 4


# A class of one sample (rank 0), of two (rank 1), of four (rank 3) and of more than d + 1 (rank d).
SMALL = ([0] + [1] * 2, [2] * 4 + [3] * 9, [4] * 5)


@pytest.mark.parametrize("factors", [True, False])
def test_bytes_of_an_upload(factors):
    loop = GivenCohorts([0, 1, 2])
    run(partial(DCPFL, factors=factors, epochs=1), 1, loop=loop, data=Toy(SMALL), limit_val_batches=0)
    assert loop.traffic.up == {"statistics": sum(expected_bytes(labels, factors) for labels in SMALL)}
    assert loop.traffic.down == {"weights": 3 * (FEATURES * 5 + 5) * 4, "statistics": 0}


@pytest.mark.parametrize("labels", [*SMALL, *Toy().labels, [0] * 9 + [3] * 7], ids=str)
def test_factors_are_never_more_than_the_matrices(labels):
    """Apart from 8 bytes a class for its rank, which full rank needs and any lower rank makes good."""
    by_factors, by_matrices = (upload(build(factors=f)[0], 0, Toy([labels])) for f in (True, False))
    classes = len(set(labels))
    assert len(by_factors.ranks) == len(by_matrices.covariances) == classes
    assert by_factors.num_bytes <= by_matrices.num_bytes + 8 * classes
    if all(labels.count(c) > FEATURES for c in labels):
        assert by_factors.ranks.tolist() == [FEATURES] * classes
        assert by_factors.num_bytes == by_matrices.num_bytes + 8 * classes
    elif any(labels.count(c) < FEATURES for c in labels):
        assert by_factors.num_bytes < by_matrices.num_bytes


def test_a_covariance_has_its_place_among_the_classes():
    """Class 1 of one sample between two others: zero there, and the mean of squares elsewhere."""
    data = Toy([[0] * 3 + [1] + [3] * 4])
    client, _ = build(factors=False)
    sent = upload(client, 0, data)
    assert sent.classes.tolist() == [0, 1, 3]
    inputs, labels = data.tensors(0)
    with torch.no_grad():
        features = client.encoder(inputs)
    expected = torch.stack([features[labels == c].T.cov() if c != 1 else torch.zeros(4, 4) for c in (0, 1, 3)])
    torch.testing.assert_close(sent.covariances, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("factors", [True, False])
def test_the_server_makes_matrices_of_the_classes_sent_alone(factors):
    client, server = build(factors=factors)
    server.receive(upload(client, 0))
    server.receive(upload(client, 4))
    assert sorted(server._pooled.covariances_by_class()) == [0, 1]


def test_the_second_round_brings_the_means_that_there_are():
    loop = GivenCohorts([0, 1], [4])
    run(partial(DCPFL, epochs=1), 2, loop=loop, limit_val_batches=0)
    assert loop.traffic.down["statistics"] == 4 * (FEATURES * 4 + 8)  # four classes, one client


def test_without_calibration_no_covariance_travels():
    client, _ = build(virtual_features=0)
    update = upload(client, 1)
    assert update.factors is update.ranks is update.covariances is None
    assert update.num_bytes == 3 * (FEATURES * 4 + 8 + 8)
    assert update.weights == {}


def test_moments_are_those_of_the_encoder_in_evaluation_mode():
    federation = run(partial(DCPFL, epochs=1), cohorts=[[0]], encoder=normed_encoder, data=Toy(batch_size=9))
    inputs, labels = Toy().tensors(0)
    with torch.no_grad():
        features = federation.client_model(0).encoder(inputs)
    sent = federation.server.broadcast(0, 1)
    for c, mean in zip(sent.classes.tolist(), sent.means, strict=True):
        torch.testing.assert_close(mean, features[labels == c].mean(0), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- uploads that are refused


def poison(tensor, value, index=0):
    changed = tensor.clone()
    changed.view(-1)[index] = value
    return changed


COMMON = {
    "no samples": (lambda u: {"num_samples": 0}, "num_samples is 0"),
    "means of another width": (lambda u: {"means": u.means[:, :3]}, r"means has shape \(2, 3\), expected \(2, 4\)"),
    "too few means": (lambda u: {"means": u.means[:1]}, r"means has shape \(1, 4\)"),
    "a mean that is NaN": (lambda u: {"means": poison(u.means, float("nan"))}, "means holds 1 non-finite"),
    "an unknown class": (lambda u: {"classes": torch.tensor([0, 5])}, r"classes is \[0, 5\]"),
    "a class twice": (lambda u: {"classes": torch.tensor([1, 1])}, r"classes is \[1, 1\]"),
    "a count of zero": (lambda u: {"counts": torch.tensor([0, 5])}, r"counts is \[0, 5\]"),
    "too few counts": (lambda u: {"counts": u.counts[:1]}, r"counts has shape \(1,\)"),
    "covariance of one sample": (lambda u: {"counts": torch.tensor([6, 1])}, "zero for fewer than two samples"),
}
AS_FACTORS = COMMON | {
    "no factors": (lambda u: {"factors": None}, "factors is missing"),
    "no ranks": (lambda u: {"ranks": None}, "ranks is missing"),
    "factors that are infinite": (lambda u: {"factors": poison(u.factors, float("inf"))}, "factors holds 1 non-finite"),
    "factors of another width": (
        lambda u: {"factors": u.factors[:, :3]},
        r"factors has shape \(8, 3\), expected \(8, 4\)",
    ),
    "too few factors": (lambda u: {"factors": u.factors[1:]}, "ranks must add up to the 7 rows"),
    "too few ranks": (lambda u: {"ranks": u.ranks[:1]}, r"ranks has shape \(1,\), expected \(2,\)"),
    "too many ranks": (lambda u: {"ranks": torch.tensor([4, 2, 2])}, r"ranks has shape \(3,\), expected \(2,\)"),
    "negative ranks": (lambda u: {"ranks": torch.tensor([-1, 9])}, r"ranks is \[-1, 9\], expected at least 0"),
    "ranks that are no integers": (
        lambda u: {"ranks": u.ranks.float()},
        "ranks has dtype torch.float32, expected torch.int64",
    ),
}
AS_MATRICES = COMMON | {
    "no covariances": (lambda u: {"covariances": None}, "covariances is missing"),
    "asymmetric": (lambda u: {"covariances": poison(u.covariances, 3.0, 1)}, "expected a covariance"),
    "not finite": (lambda u: {"covariances": poison(u.covariances, float("nan"))}, "covariances holds 1 non-finite"),
    "negative variance": (lambda u: {"covariances": -u.covariances}, "without negative eigenvalues"),
    "of another width": (
        lambda u: {"covariances": u.covariances[:, :3]},
        r"has shape \(2, 3, 4\), expected \(2, 4, 4\)",
    ),
    "of too few classes": (lambda u: {"covariances": u.covariances[:1]}, r"has shape \(1, 4, 4\)"),
}
CASES = {f"factors: {name}": (True, *case) for name, case in AS_FACTORS.items()}
CASES |= {f"matrices: {name}": (False, *case) for name, case in AS_MATRICES.items()}


@pytest.mark.parametrize(("factors", "change", "reason"), CASES.values(), ids=CASES)
def test_a_bad_upload_is_refused_and_leaves_no_trace(factors, change, reason):
    """As the first of a round and between others: what the round comes to is the same, bit by bit, as without it."""
    client, server = build(factors=factors)
    _, untouched = build(factors=factors)
    good = [upload(client, number) for number in (0, 2)]
    bad = dataclasses.replace(good[0], **change(good[0]))
    before = state_of(server)
    with pytest.raises(InvalidMessageError, match=f"client 0, round 4: .*{reason}"):
        take(server, bad)
    assert_same(state_of(server), before)
    server.aggregate()  # nothing was received
    assert_same(state_of(server), before)
    server.receive(good[0])
    assert_same(state_of(server), before)  # the head that is sent changes between rounds
    with pytest.raises(InvalidMessageError):
        take(server, bad)
    server.receive(good[1])
    server.aggregate()
    for update in good:
        untouched.receive(update)
    untouched.aggregate()
    assert_same(state_of(server), state_of(untouched))
    assert not torch.equal(server.head.weight, before["head.weight"])


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": -1.0}, r"alignment \(lambda\) must be a finite number of at least 0, got -1"),
        ({"alignment": float("nan")}, r"alignment \(lambda\) must be a finite number of at least 0, got nan"),
        ({"alignment": float("inf")}, r"alignment \(lambda\) must be a finite number of at least 0, got inf"),
        ({"virtual_features": -1}, "virtual_features must be at least 0, got -1"),
        ({"virtual_features": 10.5}, "virtual_features must be a whole number of at least 0, got 10.5"),
        ({"virtual_features": float("nan")}, "virtual_features must be a whole number of at least 0, got nan"),
        ({"virtual_features": 4}, r"virtual_features must be 0 or at least one for each class \(5\), got 4"),
        ({"server_lr": 0.0}, "server_lr must be a finite number above 0, got 0.0"),
        ({"server_lr": float("nan")}, "server_lr must be a finite number above 0, got nan"),
        ({"server_lr": float("inf")}, "server_lr must be a finite number above 0, got inf"),
        ({"calibration_epochs": 0}, "calibration_epochs must be at least 1, got 0"),
        ({"calibration_epochs": 1.5}, "calibration_epochs must be a whole number of at least 1, got 1.5"),
        ({"calibration_batch_size": 0}, "calibration_batch_size must be at least 1, got 0"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
