"""Time the combination weights of FedPAC on statistics as they come from a federation with dominant classes.

    python benchmarks/combination_weights.py --clients 20 300

Prints a Markdown table: seconds for the whole cohort by each solver, measured in alternation, and their ratio.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from pfl_lightning.functional import ClassStatistics, combination_weights, feature_variance, weighted_class_means

GROUPS = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))  # dominant classes, FedPAC section 5.1


def federation_statistics(
    clients: int, classes: int, features: int, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw features of a federation with five groups of dominant classes and return h, V and n.

    Every client has a fifth of its samples spread over all classes and the rest over its group's classes. Features
    are those of a half-trained encoder: class means as far apart as samples of a class are, through a LeakyReLU.
    """
    class_means = torch.randn(classes, features, generator=generator)
    means, variances = [], []
    for client in range(clients):
        dominant = torch.tensor(GROUPS[client % len(GROUPS)]) % classes
        uniform = torch.randint(classes, (samples // 5,), generator=generator)
        picks = torch.randint(len(dominant), (samples - len(uniform),), generator=generator)
        labels = torch.cat([uniform, dominant[picks]])
        noise = torch.randn(samples, features, generator=generator)
        client_statistics = ClassStatistics(classes, features, with_covariances=False)
        client_statistics.update(torch.nn.functional.leaky_relu(class_means[labels] + noise), labels)
        means.append(weighted_class_means(client_statistics))
        variances.append(feature_variance(client_statistics))
    return torch.stack(means), torch.stack(variances), torch.full((clients,), samples)


def by_cvxpy(means: Tensor, variances: Tensor, sizes: Tensor) -> Tensor:
    """The minimizers by cvxpy and Clarabel: one problem, with q as its parameter, solved for each client."""
    import cvxpy as cp

    centered = (means - means.mean(dim=0)).double().flatten(1)
    gram, ratio = centered @ centered.T, variances / sizes
    scale = torch.maximum(gram.diagonal().max(), ratio.max())
    values, vectors = torch.linalg.eigh((gram + torch.diag(ratio)) / scale)
    root = (vectors * values.clamp(min=0.0).sqrt()).T.numpy()  # root^T root = Q
    row, q = cp.Variable(len(means)), cp.Parameter(len(means))
    objective = cp.Minimize(cp.sum_squares(root @ row) - 2 * (q @ row))
    problem, weights = cp.Problem(objective, [row >= 0, cp.sum(row) == 1]), []
    for own in gram / scale:
        q.value = own.numpy()
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        weights.append(torch.from_numpy(row.value).clamp(min=0.0))
    found = torch.stack(weights)
    return found / found.sum(dim=1, keepdim=True)


def seconds(inputs: tuple[Tensor, Tensor, Tensor], solver: str) -> tuple[float, Tensor]:
    start = time.perf_counter()
    weights = by_cvxpy(*inputs) if solver == "cvxpy" else combination_weights(*inputs, threshold=0.0)
    return time.perf_counter() - start, weights


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 300], help="cohort sizes")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--samples", type=int, default=600, help="samples a client")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each solver; the median is shown")
    parser.add_argument("--no-cvxpy", action="store_true", help="time the active set alone")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    solvers = ["active_set"] if arguments.no_cvxpy else ["active_set", "cvxpy"]
    hardware = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{hardware}, median of {arguments.repeats}\n")
    print("| clients | active set (s) | cvxpy (s) | cvxpy / active set | largest difference | non-zeros a row |")
    print("|---:|---:|---:|---:|---:|---:|")
    for clients in arguments.clients:
        generator = torch.Generator().manual_seed(arguments.seed)
        inputs = federation_statistics(clients, arguments.classes, arguments.features, arguments.samples, generator)
        times: dict[str, list[float]] = {solver: [] for solver in solvers}
        weights: dict[str, Tensor] = {}
        for repeat in range(arguments.repeats + 1):
            for solver in solvers:
                elapsed, weights[solver] = seconds(inputs, solver)
                if repeat > 0:  # the first is a warm-up: imports, compilation of the problem's canonical form
                    times[solver].append(elapsed)
        active = statistics.median(times["active_set"])
        nonzeros = (weights["active_set"] > 1e-3).sum(dim=1).double().mean().item()
        if arguments.no_cvxpy:
            print(f"| {clients} | {active:.4f} | - | - | - | {nonzeros:.1f} |")
            continue
        reference = statistics.median(times["cvxpy"])
        difference = (weights["active_set"] - weights["cvxpy"]).abs().max().item()
        row = (f"{active:.4f}", f"{reference:.3f}", f"{reference / active:.0f}", f"{difference:.1e}", f"{nonzeros:.1f}")
        print(f"| {clients} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
