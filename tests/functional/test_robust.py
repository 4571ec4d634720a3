"""Robust averages against closed forms and plain restatements."""

import pytest
import torch

from pfl_lightning.functional.robust import (
    centered_clipping_weights,
    coordinate_median,
    geometric_median_weights,
    krum_scores,
    squared_distances,
    trimmed_mean,
)


def points(count=9, width=4, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_median_of_three_is_the_middle_one():
    assert coordinate_median(torch.tensor([[3.0, -1.0], [1.0, 1e9], [2.0, 0.0]])).tolist() == [2.0, 0.0]


def test_a_median_of_four_is_the_mean_of_the_middle_two():
    assert coordinate_median(torch.tensor([4.0, 1.0, 3.0, -1e9])).item() == 2.0


def test_a_trimmed_mean_forgets_the_ends():
    values = torch.tensor([5.0, -1e9, 1.0, 3.0, 1e9])
    assert trimmed_mean(values, 1).item() == 3.0
    assert trimmed_mean(values, 2).item() == 3.0
    assert trimmed_mean(values[[0, 2, 3]], 0).item() == 3.0


def test_distances_are_those_of_pairs():
    rows = points()
    expected = torch.cdist(rows, rows).square()
    torch.testing.assert_close(squared_distances(rows @ rows.T), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("byzantine", [1, 2, 3])
def test_scores_of_krum_equal_the_sum_over_the_closest(byzantine):
    rows = points()
    expected = []
    for i, own in enumerate(rows):
        others = sorted(float((own - other).square().sum()) for j, other in enumerate(rows) if j != i)
        expected.append(sum(others[: len(rows) - byzantine - 2]))
    found = krum_scores(squared_distances(rows @ rows.T), byzantine)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_the_geometric_median_of_points_on_a_line_is_the_middle_one():
    line = torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e3]], dtype=torch.float64)
    weights = geometric_median_weights(line @ line.T, torch.full((5,), 0.2, dtype=torch.float64), 1e-9, 500)
    assert (weights @ line).item() == pytest.approx(2.0, abs=1e-3)


def test_the_geometric_median_of_a_square_with_a_heavy_corner_is_that_corner():
    """With more than half of the weight a point is the geometric median."""
    corners = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    shares = torch.tensor([0.55, 0.15, 0.15, 0.15], dtype=torch.float64)
    weights = geometric_median_weights(corners @ corners.T, shares, 1e-9, 2000)
    torch.testing.assert_close(weights @ corners, corners[0], rtol=0, atol=1e-3)


def test_weiszfeld_equals_the_steps_on_the_points_themselves():
    rows, shares = points(), torch.arange(1.0, 10.0, dtype=torch.float64) / 45
    v = shares @ rows
    for _ in range(3):
        beta = torch.tensor([float(a / max(0.5, (row - v).norm())) for a, row in zip(shares, rows, strict=True)])
        v = (beta.double() / beta.double().sum()) @ rows
    found = geometric_median_weights(rows @ rows.T, shares, 0.5, 3) @ rows
    torch.testing.assert_close(found, v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("radius", [0.7, None])
def test_centered_clipping_equals_the_steps_on_the_points_themselves(radius):
    rows, v = points(), torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        distances = (rows - v).norm(dim=1)
        bound = float(distances.median()) if radius is None else radius  # of nine
        v = v + sum((row - v) * min(1.0, bound / float(d)) for row, d in zip(rows, distances, strict=True)) / 9
    found = centered_clipping_weights(rows @ rows.T, radius, 3) @ rows
    torch.testing.assert_close(found, v, rtol=1e-9, atol=1e-9)


def test_one_step_of_centered_clipping_moves_by_the_radius_at_most():
    rows = points() * 1e6
    assert (centered_clipping_weights(rows @ rows.T, 2.0, 1) @ rows).norm() <= 2.0 + 1e-6
