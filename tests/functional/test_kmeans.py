"""K-means inside a training step."""

import pytest
import torch
from _helpers.kmeans_references import TieError, digit_encodings, draw, make_noise, slow_kmeans, slow_start
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from pfl_lightning.functional import clustering, kmeans

SHAPES = {"points": st.integers(6, 20), "features": st.integers(1, 4), "clusters": st.integers(1, 6)}


def assert_close(found, expected, **tolerance):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def in_order(centroids):
    return centroids[centroids[:, 0].argsort()]


def assert_consistent(points, found, tolerance=1e-9):
    """Every point is with its nearest centroid, and the inertia says how far it is."""
    distances = torch.cdist(points, found.centroids, compute_mode="donot_use_mm_for_euclid_dist").square()
    own = distances.gather(1, found.assignment.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own, distances.amin(dim=1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.inertia, own.sum(), rtol=tolerance, atol=tolerance)


@given(**SHAPES, iterations=st.integers(0, 5), starts=st.integers(1, 3), seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_equals_a_slow_loop(points, features, clusters, iterations, starts, seed):
    values, noise = draw(points, features, seed), make_noise(starts, clusters, seed)
    found = kmeans(values, clusters, iterations=iterations, starts=starts, noise=noise)
    try:
        centroids, assignment, inertia = slow_kmeans(values.tolist(), clusters, iterations, noise.tolist())
    except TieError:  # rounding decides
        reject()
    assert found.inertia.item() == pytest.approx(inertia, abs=1e-9)
    torch.testing.assert_close(in_order(found.centroids), in_order(torch.tensor(centroids, dtype=torch.float64)))
    assert_consistent(values, found)
    if starts == 1:  # of two that find the same clusters, rounding decides whose numbers they get
        assert found.assignment.tolist() == assignment


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_an_iteration_is_that_of_scikit_learn(empty, seed):
    """Also where clusters are empty, because their centroids lie far from every point."""
    values = draw(40, 3, seed)
    centroids = values[:6].clone()
    centroids[:empty] += 100.0 * torch.arange(1, empty + 1).unsqueeze(1)
    reference = KMeans(6, init=centroids.numpy(), n_init=1, max_iter=1, tol=0.0).fit(values.numpy())
    points = clustering.Points(values.unsqueeze(0), values.square().sum(1).unsqueeze(0))
    found = clustering.improve(points, centroids[None, None])[0, 0]
    expected = torch.tensor(reference.cluster_centers_)
    torch.testing.assert_close(found[empty:], expected[empty:])
    # Scikit-learn takes the farthest points in no order.
    torch.testing.assert_close(in_order(found[:empty]), in_order(expected[:empty]))


def test_a_cluster_that_loses_its_only_point_stays_where_it_was():
    values = torch.tensor([[60.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    centroids = torch.tensor([[100.0, 0.0], [1000.0, 1000.0], [0.5, 0.0]])  # the second is empty
    points = clustering.Points(values.unsqueeze(0), values.square().sum(1).unsqueeze(0))
    found = clustering.improve(points, centroids[None, None])[0, 0]
    torch.testing.assert_close(found, torch.tensor([[100.0, 0.0], [60.0, 0.0], [0.0, 0.0]]))
    once_more = clustering.improve(points, found[None, None])[0, 0]
    torch.testing.assert_close(once_more[1], values[0])
    assert once_more[0].norm().item() == pytest.approx(1.0)  # one of the others


def test_weights_of_draws_are_not_negative():
    values = 100 * draw(50, 100).float()
    points = clustering.Points(values.unsqueeze(0), values.square().sum(1).unsqueeze(0))
    own = values[None, None]
    assert clustering._square_distances(points, own).min() < 0  # of a point to itself, by rounding
    assert clustering._square_distances_in_blocks(points, own).min() == 0


def test_a_step_finds_what_scikit_learn_finds_with_many_starts():
    encodings = digit_encodings()
    ratios = []
    for seed in range(6):
        batch = encodings[torch.randperm(len(encodings), generator=torch.Generator().manual_seed(seed))[:256]]
        best = KMeans(10, n_init=10, random_state=seed).fit(batch.numpy()).inertia_
        ratios.append(kmeans(batch, 10).inertia.item() / best)
    assert sum(ratios) / len(ratios) < 1.015


@given(**SHAPES, seed=st.integers(0, 10_000), scale=st.floats(0.1, 10.0), offset=st.floats(-10.0, 10.0))
@settings(max_examples=40, deadline=None)
def test_moves_and_grows_with_the_points(points, features, clusters, seed, scale, offset):
    values, noise = draw(points, features, seed), make_noise(1, clusters, seed)
    try:
        slow_start(values.tolist(), noise[0].tolist())
    except TieError:
        reject()
    found = kmeans(values, clusters, starts=1, noise=noise)
    assert_consistent(values, found)
    moved = kmeans(scale * values + offset, clusters, starts=1, noise=noise)
    expected = (scale * found.centroids + offset, found.assignment, scale**2 * found.inertia)
    assert_close(moved, expected, rtol=1e-7, atol=1e-7)


@given(
    **SHAPES,
    distinct=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_points_that_coincide_give_no_nan(points, features, clusters, distinct, seed, dtype):
    values = draw(distinct, features, seed).to(dtype)[torch.arange(points) % distinct]
    found = kmeans(values, clusters, starts=2)
    assert found.centroids.isfinite().all()
    assert ((found.assignment >= 0) & (found.assignment < clusters)).all()
    assert_consistent(values, found, tolerance=1e-4 if dtype == torch.float32 else 1e-9)
    if distinct <= clusters and dtype == torch.float64:
        assert found.inertia.item() == pytest.approx(0.0, abs=1e-12)


def test_as_many_clusters_as_points():
    values = draw(7, 3)
    found = kmeans(values, 7)
    assert sorted(found.assignment.tolist()) == list(range(7))
    assert found.inertia.item() == pytest.approx(0.0, abs=1e-20)


def test_one_cluster_is_the_mean():
    values = draw(9, 3)
    found = kmeans(values, 1)
    torch.testing.assert_close(found.centroids, values.mean(dim=0, keepdim=True))
    assert not found.assignment.any()


def test_batches_are_clustered_apart():
    values, noise = (
        torch.stack([draw(20, 3, seed) for seed in range(4)]),
        torch.stack([make_noise(2, 5, seed) for seed in range(4)]),
    )
    together = kmeans(values, 5, starts=2, noise=noise)
    assert together.centroids.shape == (4, 5, 3)
    for index in range(4):
        alone = kmeans(values[index], 5, starts=2, noise=noise[index])
        assert_close([part[index] for part in together], alone)


def test_blocks_do_not_matter(monkeypatch):
    values, noise = draw(50, 3), make_noise(2, 5)
    expected = kmeans(values, 5, starts=2, noise=noise)
    monkeypatch.setattr(clustering, "BLOCK_ELEMENTS", 70)  # seven points
    assert_close(kmeans(values, 5, starts=2, noise=noise), expected)


def test_a_point_that_is_taken_is_not_drawn_again():
    """Not even by a draw of zero."""
    values = draw(9, 3)
    found = kmeans(values, 9, iterations=0, starts=1, noise=torch.zeros(1, 9, 4))
    assert found.assignment.unique().numel() == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": torch.zeros(6)}, r"shape \(N, d\), got torch.float32 of shape \(6,\)"),
        ({"points": torch.zeros(6, 2, dtype=torch.long)}, "floating point of shape .* got torch.int64"),
        ({"points": torch.zeros(3, 2)}, "4 clusters need at least as many points, got 3: ask for fewer clusters"),
        ({"points": torch.zeros(9, 3, 2)}, "4 clusters need at least as many points, got 3"),
        ({"num_clusters": 0}, "at least 1, got 0 and 4"),
        ({"starts": 0}, "at least 1, got 4 and 0"),
        ({"iterations": -1}, "iterations must be at least 0, got -1"),
        (
            {"noise": torch.zeros(1, 4, 3)},
            r"noise must be .* shape \(4, 4, 3\), got torch.float32 of shape \(1, 4, 3\)",
        ),
        ({"noise": torch.zeros(4, 4, 3), "generator": torch.Generator()}, "got both"),
    ],
)
def test_rejects_bad_input(change, message):
    arguments = {"points": torch.zeros(6, 2), "num_clusters": 4} | change
    with pytest.raises(ValueError, match=message):
        kmeans(**arguments)
