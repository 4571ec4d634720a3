"""K-means as a training step runs it: under `torch.func`, without gradients, in whatever precision."""

import math

import pytest
import torch
from _helpers.kmeans_references import draw, make_noise
from torch.func import grad, vmap

from pfl_lightning.functional import kmeans


def assert_close(found, expected):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("autocast", [False, True])
def test_vectorizes_over_clients(autocast):
    values, noise = (
        torch.stack([draw(20, 3, seed) for seed in range(4)]),
        torch.stack([make_noise(2, 5, seed) for seed in range(4)]),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        together = vmap(lambda x, u: kmeans(x, 5, starts=2, noise=u))(values, noise)
    for index in range(4):
        assert_close([part[index] for part in together], kmeans(values[index], 5, starts=2, noise=noise[index]))


def test_clients_draw_differently():
    values = draw(30, 3).expand(6, -1, -1)
    found = vmap(lambda x: kmeans(x, 6, iterations=0, starts=1), randomness="different")(values)
    assert len({tuple(row) for row in found.assignment.tolist()}) > 1
    same = vmap(lambda x: kmeans(x, 6, iterations=0, starts=1), randomness="same")(values)
    assert len({tuple(row) for row in same.assignment.tolist()}) == 1


def test_pseudo_labels_carry_no_gradient():
    values = draw(20, 3).requires_grad_()
    found = kmeans(values, 4)
    assert not found.centroids.requires_grad
    assert not found.inertia.requires_grad

    noise = make_noise(4, 4)

    def distances(x):
        clustering = kmeans(x, 4, noise=noise)
        return (x - clustering.centroids[clustering.assignment]).square().sum()

    # The centroids are constants: the gradient of ||x - c||^2 is 2 (x - c).
    clustering = kmeans(values, 4, noise=noise)
    expected = 2 * (values.detach() - clustering.centroids[clustering.assignment])
    torch.testing.assert_close(grad(distances)(values.detach()), expected)
    many = vmap(grad(distances))(values.detach().expand(3, -1, -1))
    torch.testing.assert_close(many, expected.expand(3, -1, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_computed_in_single(dtype, autocast):
    values, noise = (40 * draw(60, 16)).to(dtype), make_noise(2, 5).float()
    assert values.float().square().sum() > torch.finfo(torch.float16).max
    expected = kmeans(values.float(), 5, starts=2, noise=noise)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = kmeans(values, 5, starts=2, noise=noise)
        single = kmeans(values.float(), 5, starts=2, noise=noise)
    assert found.centroids.dtype == found.inertia.dtype == torch.float32
    for part, other, plain in zip(found, single, expected, strict=True):
        assert torch.equal(part, plain)
        assert torch.equal(other, plain)


def test_double_stays_double():
    found = kmeans(draw(20, 3), 4)
    assert found.centroids.dtype == found.inertia.dtype == torch.float64


def test_far_from_the_origin_nothing_cancels():
    values, noise = draw(40, 4).float(), make_noise(2, 5)
    expected = kmeans(values, 5, starts=2, noise=noise)
    moved = values + 1024.0
    found = kmeans(moved, 5, starts=2, noise=noise)
    assert torch.equal(found.assignment, expected.assignment)
    torch.testing.assert_close(found.inertia, expected.inertia, rtol=1e-3, atol=0)


def test_draws_are_the_seeds():
    values = draw(30, 3)

    def centroids(seed=None, generator=None):
        torch.manual_seed(0 if seed is None else seed)
        return kmeans(values, 6, iterations=0, starts=1, generator=generator).centroids

    assert torch.equal(centroids(1), centroids(1))
    assert len({str(centroids(seed).tolist()) for seed in range(5)}) > 1
    first, second = (torch.Generator().manual_seed(7) for _ in range(2))
    assert torch.equal(centroids(1, first), centroids(2, second))
    assert not torch.equal(centroids(1, first), centroids(1, torch.Generator().manual_seed(7)))


def test_looks_at_no_values():
    found = kmeans(torch.zeros(20, 3, device="meta"), 4)
    assert found.centroids.shape == (4, 3)
    assert found.assignment.shape == (20,)
    assert found.inertia.shape == ()


def test_what_is_not_finite_stays_in_range():
    """A diverged client must show in its loss, not as an index out of range."""
    for filler in (math.nan, math.inf):
        values = draw(20, 3)
        values[3] = filler
        found = kmeans(values, 4)
        assert ((found.assignment >= 0) & (found.assignment < 4)).all()
