"""Ways to make FedAvg's steps faster than those of a plain loop: optimizers, batches gathered once, compiled steps.

    OMP_NUM_THREADS=1 python benchmarks/step_choices.py

Epochs of FedPAC's CNN over 600 images of 3 x 32 x 32 in batches of 50 in each way, in alternation; medians of processor
time as ratios to a plain loop with torch's default SGD. The first epoch of each way, which compiles, is told apart.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pfl_lightning.encoders import build_encoder

SAMPLES, BATCH = 600, 50
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "default SGD": {},
    "foreach SGD": {"foreach": True},
    "fused SGD": {"fused": True},
}


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, ...], at_once: bool) -> None:
    """Steps over all batches, which are gathered one by one or all at once."""
    order = torch.randperm(SAMPLES)
    gathered = [column[order].split(BATCH) for column in data] if at_once else []
    for place, index in enumerate(order.split(BATCH)):
        x, y = (column[place] for column in gathered) if at_once else (column[index] for column in data)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,))

    def way(at_once: bool, compiled: bool, **options: Any) -> Callable[[], None]:
        encoder: Any = build_encoder("fedpac_cnn", (3, 32, 32))
        model: nn.Module = nn.Sequential(encoder, nn.Linear(encoder.out_features, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, weight_decay=5e-4, **options)
        steps: Any = torch.compile(model) if compiled else model
        return lambda: epoch(steps, optimizer, data, at_once)

    ways = {name: way(False, False, **options) for name, options in OPTIMIZERS.items()}
    ways |= {"batches gathered once": way(True, False), "compiled model": way(False, True)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repetitions + 1):
        for name, work in ways.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    plain = statistics.median(times["default SGD"][1:])
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, torch {torch.__version__}\n")
    print("| way | ratio of an epoch | first epoch, s |\n|---|---|---|")
    for name, (first, *others) in times.items():
        print(f"| {name} | {statistics.median(others) / plain:.3f} | {first:.1f} |")


if __name__ == "__main__":
    main()
