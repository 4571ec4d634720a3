"""Combination weights of FedPAC (ICLR 2023), and the statistics of a client's features that they are found from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from pfl_lightning.functional.class_statistics import ClassStatistics
from pfl_lightning.functional.numerics import one_thread
from pfl_lightning.functional.simplex_qp import optimality_gap, solve_active_set
from pfl_lightning.functional.tensor_lists import float64_device


def weighted_class_means(statistics: ClassStatistics) -> Tensor:
    """Class means times class shares, h_k of FedPAC: rows P_k(y) mu_ky (eqs. 34 and 39).

    Args:
        statistics: one client's statistics, of at least one sample.

    Returns:
        (C, d) float64; zero rows for absent classes.

    Raises:
        ValueError: if the statistics are empty.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics, weighted_class_means
        >>> statistics = ClassStatistics(num_classes=3, num_features=1, with_covariances=False)
        >>> statistics.update(torch.tensor([[1.0], [3.0], [6.0], [10.0]]), torch.tensor([0, 0, 1, 1]))
        >>> weighted_class_means(statistics).flatten().tolist()  # means 2 and 8, each with the share 1/2
        [1.0, 4.0, 0.0]
    """
    return _class_shares(statistics).unsqueeze(1) * statistics.means


def feature_variance(statistics: ClassStatistics) -> Tensor:
    """Variance V_k of FedPAC, eq. (44): sum_y P(y) tr E[f f^T | y] - P(y)^2 ||mu_y||^2.

    Evaluated as sum_y P(y) E[||f - mu_y||^2 | y] + P(y) (1 - P(y)) ||mu_y||^2, the same without cancellation, so
    that it is never negative.

    Args:
        statistics: one client's statistics, of at least one sample.

    Returns:
        A float64 scalar >= 0.

    Raises:
        ValueError: if the statistics are empty.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics, feature_variance
        >>> statistics = ClassStatistics(num_classes=2, num_features=1, with_covariances=False)
        >>> statistics.update(torch.tensor([[1.0], [3.0], [6.0], [10.0]]), torch.tensor([0, 0, 1, 1]))
        >>> feature_variance(statistics)  # 1/2 (1 + 9)/2 - (1/2)^2 2^2 + 1/2 (36 + 100)/2 - (1/2)^2 8^2
        tensor(19.5000, dtype=torch.float64)
    """
    shares = _class_shares(statistics)
    within = statistics.square_deviations / statistics.counts.clamp(min=1)
    return (shares * within + shares * (1 - shares) * statistics.means.square().sum(dim=1)).sum()


def _class_shares(statistics: ClassStatistics) -> Tensor:
    counts = statistics.counts.to(torch.float64)
    total = counts.sum()
    if not bool(total > 0):
        raise ValueError("class shares need at least one sample, got none: has update() been called?")
    return counts / total


RELATIVE_FLOOR = 1e-12  # of the largest diagonal: a smaller variance is below what the Gram matrix resolves
RELATIVE_GAP = 1e-8  # of the objective: how far from its minimum a row may be by its optimality gap
ABSOLUTE_GAP = 1e-11  # of the scale of the program
ROWS_AT_ONCE = 512  # so that temporary memory does not grow with the square of the cohort
NEGATIVE_ROUNDING = 1e-5  # of a client's own scale; V computed in single precision may be this far below zero


def combination_weights(
    weighted_means: Tensor,
    variances: Tensor | Sequence[float],
    sizes: Tensor | Sequence[float],
    threshold: float = 1e-3,
) -> Tensor:
    """Weights with which each client combines the heads of a cohort (FedPAC, ICLR 2023, eqs. 11, 45 and 46).

    Row i minimizes, over the simplex,
    sum_j a_j^2 V_j / n_j + sum_jl a_j a_l <h_i - h_j, h_i - h_l>, whose second term is ||h_i - sum_j a_j h_j||^2 there.
    Weights below the threshold are then set to zero and the row is renormalized. Computed in double precision on one
    thread of the CPU. Where the minimum is not unique (equal clients without variance) equal clients get equal weights.

    Args:
        weighted_means: (m, C, d) rows P_k(y) mu_ky of each client, see `weighted_class_means`.
        variances: (m,) V_k, eq. (44), see `feature_variance`; rounding below zero is clamped.
        sizes: (m,) number of samples n_k, all positive.
        threshold: weights below it become zero, the paper's code has 1e-3; 0 gives the minimizer itself. A row whose
            weights are all below it stays as it is. In [0, 1).

    Returns:
        (m, m) float64 on the device of `weighted_means` (float32 where the device has no double precision), rows on
        the simplex. An active-set method solves all rows together; rows that fail the check of their optimality gap
        are solved by cvxpy. A row that neither solves is the row of the identity (the client keeps its own head), and
        a RuntimeWarning names it.

    Raises:
        ValueError: on wrong shapes, non-finite values, n <= 0, V below zero by more than rounding, or a threshold
            outside [0, 1).

    Example:
        Clients with equal class means share heads in proportion to n_k / V_k, here 1 and 3:

        >>> import torch
        >>> from pfl_lightning.functional import combination_weights
        >>> combination_weights(torch.zeros(2, 1, 1), variances=[1.0, 1.0], sizes=[10, 30])
        tensor([[0.2500, 0.7500],
                [0.2500, 0.7500]], dtype=torch.float64)

        Clients whose class means differ by far more than their variance keep their own heads:

        >>> combination_weights(torch.tensor([[[0.0]], [[10.0]]]), variances=[0.01, 0.01], sizes=[10, 30])
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"threshold must lie in [0, 1), got {threshold}")
    means, variance, size = _checked(weighted_means, variances, sizes)
    with one_thread():
        raw = _solve(*_programs(means, variance, size))
    kept = torch.where(raw < threshold, 0.0, raw)
    kept = torch.where(kept.sum(dim=1, keepdim=True) > 0, kept, raw)
    weights = kept / kept.sum(dim=1, keepdim=True)
    device = weighted_means.device
    return weights.to(device) if float64_device(device) == device else weights.float().to(device)


def _programs(means: Tensor, variances: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Build Q, q_i and c_i with objective_i(a) = scale * (a^T Q a - 2 q_i^T a + c_i) on the simplex."""
    # On the simplex the objective does not change when all h move together; around their mean less is lost to rounding.
    centered = means - means.mean(dim=0)
    gram = centered @ centered.T
    ratio = variances / sizes  # V_j / n_j of (11)
    scale = torch.maximum(gram.diagonal().max(), ratio.max())
    if not bool(scale > 0):  # all clients equal and without variance: any weights do, take the uniform ones
        scale = torch.ones_like(scale)
    gram, ratio = gram / scale, (ratio / scale).clamp(min=RELATIVE_FLOOR)
    # (45): sum_jl a_j a_l D_jl = ||h_i - sum_j a_j h_j||^2 = a^T G a - 2 G_i a + G_ii, so (46) has Q = G + diag(V / n)
    return gram + torch.diag(ratio), gram, gram.diagonal().clone()


def _solve(hessian: Tensor, linear: Tensor, constant: Tensor) -> Tensor:
    count = len(linear)
    weights, unsolved = torch.eye(count, dtype=torch.float64), torch.arange(count)
    for solve in (solve_active_set, solve_cvxpy):
        failed = []
        for rows in unsolved.split(ROWS_AT_ONCE):
            q, c = linear[rows], constant[rows]
            found = solve(hessian, q, c)
            objective = ((found @ hessian - 2 * q) * found).sum(dim=1) + c
            solved = optimality_gap(hessian, q, found) <= RELATIVE_GAP * objective.clamp(min=0.0) + ABSOLUTE_GAP
            weights[rows[solved]] = found[solved]
            failed.append(rows[~solved])
        unsolved = torch.cat(failed)
        if len(unsolved) == 0:
            return weights
    warnings.warn(
        f"combination weights: not found for rows {unsolved.tolist()} of {count}; these clients keep their own head",
        RuntimeWarning,
        stacklevel=3,  # the caller of combination_weights
    )
    return weights


def _checked(
    weighted_means: Tensor, variances: Tensor | Sequence[float], sizes: Tensor | Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three as float64 on the CPU, (m, C d), (m,) and (m,)."""
    if weighted_means.ndim != 3 or 0 in weighted_means.shape:
        raise ValueError(
            "weighted_means must have shape (clients, classes, features), none of them zero, "
            f"got {tuple(weighted_means.shape)}"
        )
    count = weighted_means.shape[0]
    means = _double(weighted_means).flatten(start_dim=1)
    variance, size = _double(variances), _double(sizes)
    for name, value in (("variances", variance), ("sizes", size)):
        if value.shape != (count,):
            raise ValueError(f"{name} must have shape ({count},), one for each client, got {tuple(value.shape)}")
    finite = {"weighted_means": means.isfinite().all(dim=1), "variances": variance.isfinite(), "sizes": size.isfinite()}
    for name, fine in finite.items():
        if wrong := (~fine).nonzero().flatten().tolist():
            raise ValueError(f"{name} must be finite, got NaN or infinity from clients {wrong}: leave them out")
    if wrong := (size <= 0).nonzero().flatten().tolist():
        raise ValueError(f"sizes must be positive, got {size[wrong].tolist()} from clients {wrong}")
    slack = NEGATIVE_ROUNDING * (means.square().sum(dim=1) + variance.clamp(min=0.0).max())
    if wrong := (variance < -slack).nonzero().flatten().tolist():
        raise ValueError(
            f"variances must not be negative, got {variance[wrong].tolist()} from clients {wrong}: "
            "eq. (44) of FedPAC is nonnegative for any features"
        )
    return means, variance.clamp(min=0.0), size


def _double(values: Tensor | Sequence[float]) -> Tensor:
    return torch.as_tensor(values).detach().cpu().to(torch.float64)


def solve_cvxpy(hessian: Tensor, linear: Tensor, constant: Tensor) -> Tensor:
    """Minimize a^T Q a - 2 q_i^T a over the simplex for each row i with cvxpy and Clarabel, as the published code does.

    Args:
        hessian: (m, m) float64 positive semidefinite Q.
        linear: (r, m) float64 rows q_i.
        constant: (r,) float64, which does not move the minimizer.

    Returns:
        Weights (r, m). Rows are on the simplex, or NaN where the solver returned no solution.
    """
    import cvxpy as cp  # takes a second to import, and most runs never need it

    weights = torch.full_like(linear, torch.nan)
    values, vectors = torch.linalg.eigh(hessian)
    root = (vectors * values.clamp(min=0.0).sqrt()).T.numpy()  # root^T root = Q, for any semidefinite Q
    row, q = cp.Variable(len(hessian)), cp.Parameter(len(hessian))
    objective = cp.Minimize(cp.sum_squares(root @ row) - 2 * (q @ row))  # type: ignore[attr-defined]
    problem = cp.Problem(objective, [row >= 0, cp.sum(row) == 1])  # type: ignore[attr-defined]
    for i in range(len(linear)):
        q.value = linear[i].numpy()
        with suppress(cp.SolverError, ArithmeticError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimality gap tells inaccurate solutions, not this solver
            problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
            if row.value is not None:
                found = torch.as_tensor(row.value, dtype=torch.float64).clamp(min=0.0)
                weights[i] = found / found.sum()
    return weights
