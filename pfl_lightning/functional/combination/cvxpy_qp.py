"""The programs of `simplex_qp`, one by one, by a general solver: the reference, and the fallback."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-12


def solve_cvxpy(hessian: Tensor, linear: Tensor) -> Tensor:
    """Minimize a^T Q a - 2 q_i^T a over the simplex for each row i with cvxpy and Clarabel.

    One problem is compiled, with q as its parameter, and solved for every row.

    Args:
        hessian: (m, m) float64 positive semidefinite Q.
        linear: (r, m) float64 rows q_i.

    Returns:
        Weights (r, m). Rows are on the simplex, or NaN where the solver returned no solution.
    """
    import cvxpy as cp  # takes a second to import and most runs never need it

    rows, size = linear.shape
    weights = torch.full_like(linear, torch.nan)
    values, vectors = torch.linalg.eigh(hessian)
    root = (vectors * values.clamp(min=0.0).sqrt()).T.numpy()  # root^T root = Q, for any semidefinite Q
    row = cp.Variable(size)
    q = cp.Parameter(size)
    objective = cp.Minimize(cp.sum_squares(root @ row) - 2 * (q @ row))  # type: ignore[attr-defined]
    problem = cp.Problem(objective, [row >= 0, cp.sum(row) == 1])  # type: ignore[attr-defined]
    for i in range(rows):
        q.value = linear[i].numpy()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimality gap tells inaccurate solutions, not this solver
                problem.solve(solver=cp.CLARABEL, tol_gap_abs=TOLERANCE, tol_gap_rel=TOLERANCE, tol_feas=TOLERANCE)
        except (cp.SolverError, ArithmeticError, ValueError):
            continue
        if row.value is None or not np.isfinite(row.value).all():
            continue
        found = torch.from_numpy(np.array(row.value, dtype=np.float64)).clamp_(min=0.0)
        weights[i] = found / found.sum()
    return weights
