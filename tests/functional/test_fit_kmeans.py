"""K-means to convergence."""

import math
import warnings

import pytest
import torch
from _helpers.kmeans_references import digit_encodings, draw
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning

from pfl_lightning.functional import clustering, fit_kmeans, kmeans


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(seed, spread):
    values, _ = make_blobs(600, n_features=16, centers=10, cluster_std=spread, random_state=seed)
    return torch.tensor(values)


def digits_by_pca():
    encodings = digit_encodings().double()
    return torch.tensor(PCA(20, random_state=0).fit_transform(encodings.numpy()))


DATA = {
    "blobs apart": lambda: blobs(0, 1.0),
    "blobs that overlap": lambda: blobs(1, 8.0),
    "encodings": digit_encodings,
    "principal components": digits_by_pca,
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("seed", [0, 1])
def test_is_as_good_as_scikit_learn(data, seed):
    values = data()
    reference = KMeans(10, n_init=10, random_state=seed).fit(values.numpy()).inertia_
    found = fit_kmeans(values, 10, generator=seeded(seed))
    assert found.inertia.item() < 1.01 * reference
    # It is the inertia of what is returned, and scikit-learn finds the same clusters from there.
    own = (values - found.centroids[found.assignment]).square().sum()
    torch.testing.assert_close(found.inertia, own)
    continued = KMeans(10, init=found.centroids.numpy(), n_init=1).fit(values.numpy())
    assert continued.inertia_ == pytest.approx(found.inertia.item(), rel=1e-3)
    assert (torch.from_numpy(continued.labels_) == found.assignment).double().mean() > 0.98


def test_finds_the_clusters_that_are_there():
    values, labels = make_blobs(300, n_features=8, centers=6, cluster_std=0.1, random_state=3)
    values, labels = torch.tensor(values), torch.tensor(labels)
    found = fit_kmeans(values, 6, generator=seeded())
    order = found.assignment[[int((labels == k).nonzero()[0]) for k in range(6)]]
    assert torch.equal(order[labels], found.assignment)
    means = torch.stack([values[labels == k].mean(dim=0) for k in range(6)])
    torch.testing.assert_close(found.centroids[order], means)


def test_tolerance_zero_stops_where_nothing_moves():
    values = draw(60, 4)
    found = fit_kmeans(values, 5, starts=3, tolerance=0.0, generator=seeded())
    means = torch.stack([values[found.assignment == k].mean(dim=0) for k in range(5)])
    torch.testing.assert_close(found.centroids, means, rtol=0, atol=1e-12)


def test_stops_after_as_many_iterations_as_a_fixed_number_does():
    values = draw(80, 4)
    for iterations in (0, 1, 3):
        found = fit_kmeans(values, 6, starts=2, max_iterations=iterations, generator=seeded())
        expected = kmeans(values, 6, starts=2, iterations=iterations, generator=seeded())
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_starts_that_have_converged_do_not_wait_for_others():
    """Each ends where it would end alone, and the best of them is returned."""
    values, clusters = draw(120, 3), 7
    noise = torch.rand(1, 5, clusters, 3, generator=seeded())
    ends = []
    for start in range(5):
        alone = clustering.Points(values.unsqueeze(0), values.square().sum(1).unsqueeze(0))
        centroids = clustering.choose_starts(alone, noise[:, [start]])
        for _ in range(200):
            centroids = clustering.improve(alone, centroids)
        ends.append(clustering.nearest(alone, centroids).square_distances.sum().item())
    assert max(ends) > 1.001 * min(ends)
    found = fit_kmeans(values, clusters, starts=5, tolerance=0.0, generator=seeded())
    assert found.inertia.item() == pytest.approx(min(ends))


def test_blocks_do_not_matter(monkeypatch):
    values = draw(200, 4)
    expected = fit_kmeans(values, 6, starts=3, generator=seeded())
    monkeypatch.setattr(clustering, "BLOCK_ELEMENTS", 500)
    for got, want in zip(fit_kmeans(values, 6, starts=3, generator=seeded()), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distinct", [1, 3])
def test_points_that_coincide_give_no_nan(distinct, dtype):
    values = draw(distinct, 4).to(dtype)[torch.arange(30) % distinct]
    found = fit_kmeans(values, 5, generator=seeded())
    assert found.centroids.isfinite().all()
    assert found.inertia.item() == pytest.approx(0.0, abs=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert KMeans(5, n_init=1).fit(values.numpy()).inertia_ == pytest.approx(0.0, abs=1e-10)


def test_low_precision_is_computed_in_single():
    values = (40 * draw(60, 16)).to(torch.bfloat16)
    expected = fit_kmeans(values.float(), 5, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        found = fit_kmeans(values, 5, generator=seeded())
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
    assert fit_kmeans(values.double(), 5).inertia.dtype == torch.float64


def test_draws_are_the_generators():
    values = draw(50, 3)

    def starts(generator=None):
        return fit_kmeans(values, 8, starts=1, max_iterations=0, generator=generator).centroids

    before = torch.get_rng_state()
    assert torch.equal(starts(seeded(1)), starts(seeded(1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert len({str(starts(seeded(seed)).tolist()) for seed in range(5)}) > 1
    assert not torch.equal(starts(), starts())


def test_carries_no_gradient():
    found = fit_kmeans(draw(20, 3).requires_grad_(), 4)
    assert not found.centroids.requires_grad
    assert not found.inertia.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": torch.zeros(2, 6, 2)}, r"shape \(N, d\), got torch.float32 of shape \(2, 6, 2\)"),
        ({"points": torch.zeros(6, 2, dtype=torch.long)}, "floating point of shape"),
        ({"points": torch.zeros(3, 2)}, "4 clusters need at least as many points, got 3: ask for fewer clusters"),
        ({"points": torch.tensor([[0.0], [math.nan], [1.0], [math.inf], [2.0]])}, "finite, got 2 of 5 that are not"),
        ({"num_clusters": 0}, "at least 1, got 0 and 10"),
        ({"starts": 0}, "at least 1, got 4 and 0"),
        ({"max_iterations": -1}, "at least 0, got -1 and 0.0001"),
        ({"tolerance": -1.0}, "at least 0, got 300 and -1.0"),
        ({"tolerance": math.nan}, "at least 0, got 300 and nan"),
    ],
)
def test_rejects_bad_input(change, message):
    arguments = {"points": torch.zeros(6, 2), "num_clusters": 4} | change
    with pytest.raises(ValueError, match=message):
        fit_kmeans(**arguments)
