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
from unittest.mock import patch

import torch
from torch import Tensor

from pfl_lightning.functional import (
    ClassStatistics,
    combination,
    combination_weights,
    feature_variance,
    weighted_class_means,
)

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


def seconds(inputs: tuple[Tensor, Tensor, Tensor], solver: str) -> tuple[float, Tensor]:
    solve = combination.solve_cvxpy if solver == "cvxpy" else combination.solve_active_set
    with patch.object(combination, "solve_active_set", solve):
        start = time.perf_counter()
        weights = combination_weights(*inputs, threshold=0.0)
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
