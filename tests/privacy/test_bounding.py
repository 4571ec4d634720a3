"""How far one client can move the sums, and the mean, against slow restatements."""

import math

import pytest
import torch
from _helpers.privacy import METHODS, an_update, make
from _helpers.toy import CLASSES, FEATURES

from pfl_lightning.privacy.bounding import _matrices, _triangles, clipped, contribution, mean_update

BOUNDS = {"clip_norm": 0.7, "class_norm": 0.4}


def parts_of(name, seed, scale):
    mechanism, server = make(name, **BOUNDS)
    update = an_update(name, server, seed, scale)
    server.check(update)
    return mechanism, contribution(mechanism.layout, update, server.broadcast(0, 0), 0.7, 0.4), update


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e5])
def test_one_client_moves_the_sums_by_at_most_their_sensitivity(name, scale):
    """Number by number: what a client adds is what taking it away removes."""
    for seed in range(3):
        mechanism, (parts, _), _ = parts_of(name, seed, scale)
        squares = dict.fromkeys(mechanism.layout.bounds(**BOUNDS), 0.0)
        for key, part in parts.items():
            squares[key.partition(".")[0]] += sum(float(v) ** 2 for v in part.flatten())
        for kind, bound in mechanism.layout.bounds(**BOUNDS).items():
            assert math.sqrt(squares[kind]) <= bound * (1 + 1e-5), kind
        # In units of the noise, all kinds together move by at most 1 / z.
        noise = {kind: mechanism.multiplier() * bound for kind, bound in mechanism.layout.bounds(**BOUNDS).items()}
        assert sum(squares[kind] / noise[kind] ** 2 for kind in squares) <= 1 + 1e-5


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_weights_are_clipped_together(scale):
    _, (parts, within), update = parts_of("FedAvg", 3, scale)
    _, server = make()
    changes = {n: w - server.weights.as_state()[n] for n, w in update.weights.items()}
    norm = math.sqrt(sum(float(v) ** 2 for change in changes.values() for v in change.flatten()))
    assert within == (norm <= 0.7)
    for name, change in changes.items():
        torch.testing.assert_close(parts[f"weights.{name}"], change * min(1, 0.7 / norm), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["FedProto", "FedPAC"])
def test_numbers_of_samples_tell_no_more_than_presence(name):
    _, (parts, _), update = parts_of(name, 1, 1.0)
    present = set(update.classes.tolist()) if name == "FedProto" else set(update.counts.nonzero().flatten().tolist())
    assert parts["presence"].tolist() == [float(c in present) for c in range(CLASSES)]
    rows = parts["means" if name == "FedProto" else "centroids"]
    assert all(bool(rows[c].any()) == (c in present) for c in range(CLASSES))


def test_covariances_as_vectors_have_their_norms_and_come_back():
    factor = torch.randn(3, FEATURES, FEATURES, generator=torch.Generator().manual_seed(0))
    matrices = factor.mT @ factor
    vectors = _triangles(matrices)
    torch.testing.assert_close(vectors.norm(dim=1), matrices.flatten(1).norm(dim=1))
    torch.testing.assert_close(_matrices(vectors, FEATURES), matrices.double(), rtol=1e-5, atol=1e-5)
    repaired = _matrices(_triangles(matrices - 5 * torch.eye(FEATURES)), FEATURES)
    assert bool((torch.linalg.eigvalsh(repaired) > -1e-9).all())


def test_rows_are_clipped_one_by_one():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(clipped(rows, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


@pytest.mark.parametrize("name", METHODS)
def test_without_noise_the_mean_is_that_of_what_is_clipped(name):
    """A restatement over three clients of four expected; the update is one that the server takes."""
    mechanism, server = make(name, **BOUNDS)
    sent = server.broadcast(0, 0)
    updates = [an_update(name, server, seed) for seed in range(3)]
    parts = [contribution(mechanism.layout, update, sent, 0.7, 0.4)[0] for update in updates]
    sums = {key: sum(part[key].double() for part in parts) for key in parts[0]}
    mean = mean_update(mechanism.layout, server, sent, sums, 4.0, 1.0, 0.4)
    server.check(mean)
    for key in mechanism.layout.weights:
        expected = sent.weights[key] + sum(part[f"weights.{key}"] for part in parts) / 4
        torch.testing.assert_close(mean.weights[key], expected, rtol=1e-5, atol=1e-6)
    if name == "FedAvg":
        return
    field = "centroids" if name == "FedPAC" else "means"
    held = {c: [part[field][c] for part in parts if part["presence"][c]] for c in range(CLASSES)}
    seen = [c for c in range(CLASSES) if held[c]]
    rows = mean.centroids[seen] if name == "FedPAC" else mean.means
    assert seen == (mean.counts.nonzero().flatten() if name == "FedPAC" else mean.classes).tolist()
    for row, c in zip(rows, seen, strict=True):
        torch.testing.assert_close(row, sum(held[c]) / len(held[c]), rtol=1e-5, atol=1e-6)
    if name.startswith("DCPFL"):
        ends = [0, *mean.ranks.cumsum(0).tolist()] if name == "DCPFL" else []
        for place, c in enumerate(seen):
            triangle = sum(part[mechanism.layout.covariances][c] for part in parts) / len(held[c])
            expected = _matrices(triangle[None], FEATURES)[0].float()
            if name == "DCPFL":
                factor = mean.factors[ends[place] : ends[place + 1]]
                got = factor.T @ factor
            else:
                got = mean.covariances[place]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_class_of_too_few_clients_is_not_sent():
    mechanism, server = make("FedProto")
    sums = {"presence": torch.tensor([2.4, 0.9, 3.0, -1.0, 2.0]), "means": torch.ones(CLASSES, FEATURES).double()}
    mean = mean_update(mechanism.layout, server, server.broadcast(0, 0), sums, 4.0, 2.0, 9.0)
    assert mean.classes.tolist() == [0, 2, 4]
    assert mean.counts.tolist() == [2, 3, 2]
    torch.testing.assert_close(mean.means[:, 0], torch.tensor([1 / 2.4, 1 / 3, 1 / 2]))
    sums["presence"].fill_(0.5)
    assert mean_update(mechanism.layout, server, server.broadcast(0, 0), sums, 4.0, 2.0, 9.0) is None
