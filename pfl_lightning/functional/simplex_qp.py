"""Many quadratic programs over the simplex that share one Hessian, by active sets.

Each row minimizes f(a) = a^T Q a - 2 q^T a over a >= 0, sum(a) = 1. With t the multiplier of the equality, the optimum
is characterized by y = Q a - q - t 1 >= 0, a >= 0, a^T y = 0. An active-set method guesses which weights are positive
(the passive set), solves the equality-constrained problem there, and corrects the guess by the signs.

Block principal pivoting (Portugal, Judice and Vicente 1994; Kim and Park 2011) moves all indices of a wrong sign at
once and needs a handful of steps as a rule. Rows on which it stops making progress (many clients, few features, little
variance) are finished by descent in the manner of Lawson and Hanson: one index enters at a time, the iterate stays
feasible and the objective does not grow, so that no set comes back. All rows take each step together.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_PIVOTS = 100
PATIENCE = 3  # pivots without progress before a row is left to descent
IDLE_ARRIVALS = 30  # solutions without a lower objective before descent gives up; single steps may be below rounding
DESCENT_STEPS_PER_INDEX = 10
CHUNK_ELEMENTS = 2**19  # numbers in one batch of subproblems, 4 MiB
WEIGHT_TOLERANCE = 1e-12  # a weight this little below zero is zero
DUAL_TOLERANCE = 1e-10  # of a row's objective
OBJECTIVE_RESOLUTION = 1e-4  # an objective below this, Q being of order one, counts as this in the dual tolerance


def solve_active_set(hessian: Tensor, linear: Tensor, constant: Tensor) -> Tensor:
    """Minimize a^T Q a - 2 q_i^T a + c_i over the simplex for each row i.

    Args:
        hessian: (m, m) float64 positive definite Q, scaled so that its entries are of order one at most.
        linear: (r, m) float64 rows q_i.
        constant: (r,) float64 c_i, which makes the objective of each row nonnegative; it sets the row's tolerance.

    Returns:
        Weights (r, m). Rows are on the simplex, or NaN where Q turned out singular. Check them by
        `optimality_gap`.

    Example:
        With Q = I and c = ||q||^2 the program is the Euclidean projection of q onto the simplex:

        >>> import torch
        >>> q = torch.tensor([[0.75, 0.25], [2.0, 0.0]], dtype=torch.float64)
        >>> solve_active_set(torch.eye(2, dtype=torch.float64), q, q.square().sum(dim=1)).tolist()
        [[0.75, 0.25], [1.0, 0.0]]
    """
    weights, solved = _pivot(hessian, linear, constant)
    rest = (~solved).nonzero().flatten()
    if len(rest) > 0:
        weights[rest] = _descend(hessian, linear[rest], constant[rest])
    weights = weights.clamp(min=0.0)
    return weights / weights.sum(dim=1, keepdim=True)


def _pivot(hessian: Tensor, linear: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Block principal pivoting: weights, and which rows ended with the right signs."""
    rows, size = linear.shape
    weights, solved = torch.zeros_like(linear), torch.zeros(rows, dtype=torch.bool)
    live = torch.arange(rows)
    passive = torch.ones(rows, size, dtype=torch.bool)
    fewest = torch.full((rows,), size + 1)
    patience = torch.full((rows,), PATIENCE)
    for _ in range(MAX_PIVOTS):
        current, multiplier = _solve_on_passive_sets(hessian, linear[live], passive[live])
        dual, floor, _ = _dual(hessian, linear[live], constant[live], current, multiplier)
        wrong = torch.where(passive[live], current < -WEIGHT_TOLERANCE, dual < -floor)
        count = wrong.sum(dim=1)
        done = count == 0
        weights[live[done]], solved[live[done]] = current[done], True
        patience[live] = torch.where(count < fewest[live], PATIENCE, patience[live] - 1)
        fewest[live] = torch.minimum(fewest[live], count)
        going = ~done & (patience[live] >= 0) & current.isfinite().all(dim=1)
        live, wrong = live[going], wrong[going]
        if len(live) == 0:
            break
        passive[live] ^= wrong
    return weights, solved


def _descend(hessian: Tensor, linear: Tensor, constant: Tensor) -> Tensor:
    """Feasible descent from each row's best vertex."""
    rows, size = linear.shape
    live = torch.arange(rows)
    best_vertex = (hessian.diagonal() - 2 * linear).argmin(dim=1)
    weights = torch.zeros_like(linear).scatter_(1, best_vertex.unsqueeze(1), 1.0)
    passive = weights > 0
    lowest = torch.full((rows,), torch.inf, dtype=linear.dtype)
    idle = torch.zeros(rows, dtype=torch.int64)
    for _ in range(DESCENT_STEPS_PER_INDEX * size):
        current, target_set = weights[live], passive[live]
        target, multiplier = _solve_on_passive_sets(hessian, linear[live], target_set)
        # Walk towards the solution on the passive set as far as no weight turns negative; who stops the walk leaves.
        negative = target < -WEIGHT_TOLERANCE
        reach = torch.where(negative, current / (current - target), torch.inf)
        step = reach.amin(dim=1, keepdim=True).clamp(max=1.0)
        leaving = negative & (reach <= step)
        weights[live] = torch.where(leaving, 0.0, current + step * (target - current)).clamp(min=0.0)
        # Where the solution was reached the index of the most negative y enters, if there is one.
        arrived = ~negative.any(dim=1)
        dual, floor, objective = _dual(hessian, linear[live], constant[live], target, multiplier)
        least, entering = torch.where(target_set, torch.inf, dual).min(dim=1)
        idle[live] = torch.where(objective < lowest[live], 0, idle[live] + arrived)
        stop = arrived & ((least >= -floor.squeeze(1)) | (idle[live] > IDLE_ARRIVALS))
        lowest[live] = torch.where(arrived, torch.minimum(objective, lowest[live]), lowest[live])
        target_set &= ~leaving
        target_set[arrived, entering[arrived]] = True
        passive[live] = target_set
        live = live[~stop & target.isfinite().all(dim=1)]
        if len(live) == 0:
            break
    return weights


def _dual(
    hessian: Tensor, linear: Tensor, constant: Tensor, weights: Tensor, multiplier: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = Q a - q - t 1, how far below zero rounding may take it (r, 1), and the objectives (r,).

    Holds for solutions on a passive set: there Q a = q + t 1, so that a^T Q a - 2 q^T a + c = t - q^T a + c.
    """
    dual = weights @ hessian - linear - multiplier.unsqueeze(1)
    objective = multiplier - (linear * weights).sum(dim=1) + constant
    return dual, DUAL_TOLERANCE * objective.clamp(min=OBJECTIVE_RESOLUTION).unsqueeze(1), objective


def optimality_gap(hessian: Tensor, linear: Tensor, weights: Tensor) -> Tensor:
    """Upper bound of f(a) - min f for feasible rows, from the violation of the optimality conditions.

    By convexity f(a) - min f <= grad f(a)^T (a - e_j) for the best vertex e_j.

    Args:
        hessian: (m, m) Q.
        linear: (r, m) rows q_i.
        weights: (r, m) rows on the simplex.

    Returns:
        (r,) upper bounds of f(a) - min f; zero at the optimum.

    Example:
        For q = (2, 0) the optimum is (1, 0); the other vertex is worse by ||(0, 1) - q||^2 - ||(1, 0) - q||^2 = 4.

        >>> import torch
        >>> optimality_gap(torch.eye(2), torch.tensor([[2.0, 0.0]] * 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([0., 6.])
    """
    gradient = 2 * (weights @ hessian - linear)
    return (gradient * weights).sum(dim=1) - gradient.amin(dim=1)


def _solve_on_passive_sets(hessian: Tensor, linear: Tensor, passive: Tensor) -> tuple[Tensor, Tensor]:
    """Solve min a^T Q a - 2 q^T a, sum(a) = 1, with a zero off each row's passive set; weights and multipliers."""
    if bool(passive.all()):
        return _solve_on_everything(hessian, linear)
    weights, multipliers = torch.zeros_like(linear), torch.zeros(len(linear), dtype=linear.dtype)
    sizes = passive.sum(dim=1)
    order = sizes.argsort()  # rows of like sizes together, so that little is spent on padding
    start = 0
    while start < len(order):
        step = max(1, CHUNK_ELEMENTS // int(sizes[order[-1]]) ** 2)
        chunk = order[start : start + step]
        weights[chunk], multipliers[chunk] = _solve_chunk(hessian, linear[chunk], passive[chunk])
        start += step
    return weights, multipliers


def _solve_chunk(hessian: Tensor, linear: Tensor, passive: Tensor) -> tuple[Tensor, Tensor]:
    size = int(passive.sum(dim=1).max())
    # The passive indices of each row first; rows with fewer are padded by others, masked to an identity block.
    index = passive.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :size]
    valid = passive.gather(1, index).to(linear.dtype)
    block = hessian[index.unsqueeze(2), index.unsqueeze(1)] * valid.unsqueeze(2) * valid.unsqueeze(1)
    block.diagonal(dim1=1, dim2=2).add_(1.0 - valid)
    sides = torch.stack([linear.gather(1, index) * valid, valid], dim=2)
    factor, info = torch.linalg.cholesky_ex(block)
    solution = torch.cholesky_solve(sides, factor)
    # Q_FF a = q_F + t 1 gives a = u + t w with Q_FF u = q_F, Q_FF w = 1, and sum(a) = 1 gives t.
    sums = solution.sum(dim=1)
    multiplier = (1.0 - sums[:, 0]) / sums[:, 1]
    values = solution[:, :, 0] + multiplier.unsqueeze(1) * solution[:, :, 1]
    values = torch.where((info == 0).unsqueeze(1), values, torch.nan)
    return torch.zeros_like(linear).scatter_(1, index, values), multiplier


def _solve_on_everything(hessian: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """The first step: all rows share one factor."""
    factor, info = torch.linalg.cholesky_ex(hessian)
    if int(info) != 0:
        return torch.full_like(linear, torch.nan), torch.full((len(linear),), torch.nan, dtype=linear.dtype)
    sides = torch.cat([linear, torch.ones_like(linear[:1])]).T
    solution = torch.cholesky_solve(sides, factor).T
    free, ones = solution[:-1], solution[-1]
    multiplier = (1.0 - free.sum(dim=1)) / ones.sum()
    return free + multiplier.unsqueeze(1) * ones, multiplier
