import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.functional import combination, combination_weights, simplex_qp


def random_statistics(clients, classes=5, features=8, variance=1.0, seed=0):
    """h near five groups' means, V of the order of ||h||^2, sizes between 50 and 600."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    groups = torch.randn(5, classes, features, **options)
    means = groups[torch.arange(clients) % 5] + 0.3 * torch.randn(clients, classes, features, **options)
    variances = variance * classes * features * (0.5 + torch.rand(clients, **options))
    return means, variances, torch.randint(50, 600, (clients,), generator=generator)


def literal_quadratic_form(i, means, variances, sizes):
    """The matrix of R_i: eqs. (11), (45) and (46) as printed, outer products and all."""
    h, count = means.numpy(), len(means)
    form = np.zeros((count, count))
    for j in range(count):
        form[j, j] += float(variances[j]) / float(sizes[j])
        for k in range(count):
            outer_sum = np.zeros((h.shape[2], h.shape[2]))
            for y in range(h.shape[1]):
                outer_sum += np.outer(h[i, y] - h[j, y], h[i, y] - h[k, y])
            form[j, k] += np.trace(outer_sum)
    return form


def general_solver(form):
    scale = form.diagonal().max()
    a = cp.Variable(len(form))
    objective = cp.quad_form(a, cp.psd_wrap((form + form.T) / (2 * scale)))
    problem = cp.Problem(cp.Minimize(objective), [a >= 0, cp.sum(a) == 1])
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
    weights = np.maximum(a.value, 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize(("clients", "variance"), [(2, 1.0), (7, 1.0), (13, 20.0), (20, 0.05), (50, 1.0)])
def test_agrees_with_outer_products_and_a_general_solver(clients, variance):
    statistics = random_statistics(clients, classes=3, features=4, variance=variance, seed=clients)
    weights = combination_weights(*statistics, threshold=0.0).numpy()
    for i in range(0, clients, max(1, clients // 7)):
        form = literal_quadratic_form(i, *statistics)
        expected = general_solver(form)
        np.testing.assert_allclose(weights[i], expected, rtol=0, atol=1e-4)
        found, best = weights[i] @ form @ weights[i], expected @ form @ expected
        # An interior-point method stops a little above the minimum.
        assert found <= best * (1 + 1e-8)


@given(
    clients=st.integers(1, 25),
    classes=st.integers(1, 4),
    features=st.integers(1, 6),
    log_variance=st.integers(-4, 4),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=80, deadline=None)
def test_satisfies_the_optimality_conditions(clients, classes, features, log_variance, seed):
    statistics = random_statistics(clients, classes, features, 10.0**log_variance, seed)
    weights = combination_weights(*statistics, threshold=0.0).numpy()
    h = statistics[0].flatten(1).numpy()
    ratio = (statistics[1] / statistics[2]).numpy()
    for i in range(clients):
        assert weights[i].min() >= 0.0
        assert weights[i].sum() == pytest.approx(1.0, abs=1e-12)
        # Half the gradient of R_i: equal where a weight is positive, nowhere lower. Scale: the largest ||h_i - h_j||^2.
        residual = h[i] - weights[i] @ h
        gradient = weights[i] * ratio - (h - h[i]) @ residual
        scale = ratio.max() + ((h - h[i]) ** 2).sum(1).max()
        level = weights[i] @ gradient
        assert np.all(gradient >= level - 1e-10 * scale)
        assert np.all(np.abs(gradient - level)[weights[i] > 1e-9] <= 1e-8 * scale)


def test_two_clients_in_closed_form():
    # R_0(a) = (1 - a)^2 v_0 + a^2 (v_1 + D) is least at a = v_0 / (v_0 + v_1 + D).
    means = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])
    weights = combination_weights(means, [50.0, 100.0], [10, 10], threshold=0.0)
    expected = torch.tensor([[1 - 5 / 40, 5 / 40], [10 / 40, 1 - 10 / 40]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7)


def test_equal_means_are_weighted_by_inverse_variance():
    sizes, variances = torch.tensor([10.0, 20.0, 70.0]), torch.tensor([1.0, 2.0, 3.5])
    precision = (sizes / variances).double()
    weights = combination_weights(torch.ones(3, 2, 2), variances, sizes, threshold=0.0)
    torch.testing.assert_close(weights, (precision / precision.sum()).expand(3, 3), rtol=0, atol=1e-6)


def test_a_single_client_keeps_its_head():
    assert combination_weights(torch.randn(1, 3, 4), [2.0], [5]).tolist() == [[1.0]]
    assert combination_weights(torch.zeros(1, 3, 4), [0.0], [5]).tolist() == [[1.0]]


@pytest.mark.parametrize("variance", [0.0, 1.0])
def test_duplicates_share_equally(variance):
    base = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1))
    weights = combination_weights(base.repeat(3, 1, 1), [variance] * 12, [10] * 12, threshold=0.0)
    assert weights.isfinite().all()
    copies = weights.view(3, 4, 3, 4)
    # Without variance the programs are singular up to rounding, and so the shares are equal to fewer digits.
    tolerance = 1e-5 if variance > 0 else 1e-3
    torch.testing.assert_close(copies, copies[:1, :, :1].expand_as(copies), rtol=0, atol=tolerance)
    if variance == 0.0:  # no variance to reduce: nothing but the client's own copies
        torch.testing.assert_close(copies[0, :, 0], torch.eye(4, dtype=torch.float64) / 3, rtol=0, atol=1e-3)


@pytest.mark.parametrize("variance", [0.0, 1e-12, 1e-6, 1e-3])
def test_more_clients_than_dimensions_and_hardly_any_variance(variance):
    # Here pivoting stalls and descent finishes; R_i itself must still be as low as the general solver finds it.
    statistics = random_statistics(60, classes=4, features=4, variance=variance)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = combination_weights(*statistics, threshold=0.0).numpy()
    scale = statistics[0].square().sum(dim=(1, 2)).max().item()
    for i in (0, 17, 59):
        form = literal_quadratic_form(i, *statistics)
        best = general_solver(form)
        assert weights[i] @ form @ weights[i] <= best @ form @ best + 1e-11 * scale


def test_descent_finishes_what_pivoting_leaves(monkeypatch):
    statistics = random_statistics(30, seed=3)
    expected = combination_weights(*statistics, threshold=0.0)
    monkeypatch.setattr(simplex_qp, "MAX_PIVOTS", 0)
    torch.testing.assert_close(combination_weights(*statistics, threshold=0.0), expected, rtol=0, atol=1e-9)


@given(st.permutations(range(9)))
@settings(max_examples=20, deadline=None)
def test_permuting_clients_permutes_the_weights(permutation):
    means, variances, sizes = random_statistics(9)
    order = torch.tensor(permutation)
    weights = combination_weights(means, variances, sizes, threshold=0.0)
    permuted = combination_weights(means[order], variances[order], sizes[order], threshold=0.0)
    torch.testing.assert_close(permuted, weights[order][:, order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scale_and_common_offset_do_not_matter(scale):
    means, variances, sizes = random_statistics(12)
    expected = combination_weights(means, variances, sizes, threshold=0.0)
    scaled = combination_weights(means * scale, variances * scale**2, sizes, threshold=0.0)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-5)
    shifted = combination_weights(means + 100.0, variances, sizes, threshold=0.0)
    torch.testing.assert_close(shifted, expected, rtol=0, atol=1e-5)


def test_threshold_cuts_and_renormalizes():
    statistics = random_statistics(40)
    raw = combination_weights(*statistics, threshold=0.0)
    cut = combination_weights(*statistics, threshold=0.05)
    assert ((raw > 0) & (raw < 0.05)).any()
    kept = torch.where(raw >= 0.05, raw, torch.zeros_like(raw))
    torch.testing.assert_close(cut, kept / kept.sum(1, keepdim=True))
    default = combination_weights(*statistics)
    assert default[default > 0].min() >= 1e-3


def test_a_row_all_below_the_threshold_stays():
    weights = combination_weights(torch.zeros(4, 2, 2), [1.0] * 4, [10] * 4, threshold=0.3)
    torch.testing.assert_close(weights, torch.full((4, 4), 0.25, dtype=torch.float64))


def test_single_precision_input_gives_double_weights():
    means, variances, sizes = random_statistics(10)
    single = combination_weights(means.float().requires_grad_(), variances.float(), sizes.tolist(), threshold=0.0)
    assert single.dtype == torch.float64
    assert not single.requires_grad
    torch.testing.assert_close(single, combination_weights(means, variances, sizes, threshold=0.0), rtol=0, atol=1e-5)


def uniform(hessian, linear, constant):
    return torch.full_like(linear, 1 / linear.shape[1])


def test_a_wrong_answer_is_noticed_and_solved_by_cvxpy(monkeypatch):
    statistics = random_statistics(6)
    expected = combination_weights(*statistics, threshold=0.0)
    monkeypatch.setattr(combination, "solve_active_set", uniform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = combination_weights(*statistics, threshold=0.0)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def test_cvxpy_takes_semidefinite_programs_of_duplicates(monkeypatch):
    base = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1))
    statistics = base.repeat(3, 1, 1), [1.0] * 12, [10] * 12
    expected = combination_weights(*statistics, threshold=0.0)
    monkeypatch.setattr(combination, "solve_active_set", uniform)
    torch.testing.assert_close(combination_weights(*statistics, threshold=0.0), expected, rtol=0, atol=1e-5)


def test_rows_that_neither_solves_keep_their_own_head(monkeypatch):
    statistics = random_statistics(6)
    expected = combination_weights(*statistics)
    solve = combination.solve_active_set

    def fails_in_rows_one_and_four(hessian, linear, constant):
        weights = solve(hessian, linear, constant)
        weights[[1, 4]] = torch.nan
        return weights

    monkeypatch.setattr(combination, "solve_active_set", fails_in_rows_one_and_four)
    monkeypatch.setattr(combination, "solve_cvxpy", uniform)
    with pytest.warns(RuntimeWarning, match=r"rows \[1, 4\] of 6"):
        weights = combination_weights(*statistics)
    expected[[1, 4]] = torch.eye(6, dtype=torch.float64)[[1, 4]]
    assert torch.equal(weights, expected)


def test_rounding_below_zero_is_clamped_and_more_is_refused():
    means = torch.ones(3, 2, 2)
    weights = combination_weights(means, [1.0, 1.0, -1e-6], [10, 10, 10])
    torch.testing.assert_close(weights, torch.eye(3, dtype=torch.float64)[[2, 2, 2]], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r"must not be negative, got \[-0.1.*\] from clients \[2\]"):
        combination_weights(means, [1.0, 1.0, -0.1], [10, 10, 10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weighted_means": torch.zeros(3, 4)}, r"shape \(clients, classes, features\)"),
        ({"weighted_means": torch.zeros(0, 2, 2)}, r"got \(0, 2, 2\)"),
        ({"weighted_means": torch.full((3, 2, 2), float("nan"))}, r"weighted_means must be finite.*\[0, 1, 2\]"),
        ({"variances": [1.0, 1.0]}, r"variances must have shape \(3,\)"),
        ({"variances": [1.0, float("inf"), 1.0]}, r"variances must be finite.*\[1\]"),
        ({"sizes": torch.ones(3, 1)}, r"sizes must have shape \(3,\)"),
        ({"sizes": [1, 0, -2]}, r"sizes must be positive, got \[0.0, -2.0\] from clients \[1, 2\]"),
        ({"sizes": [1, 1, float("nan")]}, r"sizes must be finite.*\[2\]"),
        ({"threshold": 1.0}, r"threshold must lie in \[0, 1\)"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
    ],
)
def test_rejects_bad_input(change, message):
    arguments = {"weighted_means": torch.zeros(3, 2, 2), "variances": [1.0] * 3, "sizes": [10] * 3} | change
    with pytest.raises(ValueError, match=message):
        combination_weights(**arguments)


def test_restores_the_number_of_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    combination_weights(*random_statistics(3))
    assert torch.get_num_threads() == 2

    def fails(*programs):
        assert torch.get_num_threads() == 1
        raise FloatingPointError

    monkeypatch.setattr(combination, "solve_active_set", fails)
    with pytest.raises(FloatingPointError):
        combination_weights(*random_statistics(3))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_rows_solved_in_blocks_are_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(17, 4, 6, generator=generator, dtype=torch.float64)
    variances, sizes = torch.rand(17, generator=generator) * 20, torch.randint(5, 50, (17,), generator=generator)
    whole = combination_weights(means, variances, sizes, threshold=0.0)
    monkeypatch.setattr(combination, "ROWS_AT_ONCE", 3)
    torch.testing.assert_close(combination_weights(means, variances, sizes, threshold=0.0), whole, rtol=0, atol=1e-12)
