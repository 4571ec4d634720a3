"""Time of an optimizer step on 1, 2, 4 and 8 threads, beside its work: where the engines' rule has its thresholds from.

    python benchmarks/threads.py
    python benchmarks/threads.py --encoders resnet18 --batches 8 16 32 --threads 1 2
    OMP_WAIT_POLICY=passive python benchmarks/threads.py --median

Each row is an encoder with a linear head and a batch size. Repetitions go through the numbers of threads in turn, and
the fastest step of them counts, so that what else the machine does decides little; ``--median`` takes the median step,
in which other processes show. "gain" is the time on one thread over the time on so many; "rule" is the number that an
engine takes by itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from datetime import date

import torch
from torch import nn
from torch.nn import functional as F

from pfl_lightning.encoders import build_encoder
from pfl_lightning.engines.threads import threads_for_work, work_of

SHAPES = {"small_cnn": (1, 8, 8), "mlp": (1, 8, 8)}
"""Inputs of the encoders that are not shown 3 x 32 x 32."""


def step_times(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, threads: int, steps: int) -> list[float]:
    """Seconds of each of some optimizer steps on so many threads."""
    torch.set_num_threads(threads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    found = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(time.perf_counter() - start)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    encoders = ["mlp", "small_cnn", "dcpfl_cnn1", "fedpac_cnn", "small_alexnet", "resnet18_small", "resnet18"]
    parser.add_argument("--encoders", nargs="+", default=encoders, help="registered names")
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a measurement, about")
    parser.add_argument("--median", action="store_true", help="the median step instead of the fastest")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{date.today()}, {cores} cores of {platform.machine()}, torch {torch.__version__}\n")
    print("| encoder | batch | GFLOP | ms, 1 thread |" + "".join(f" gain, {n} |" for n in args.threads[1:]) + " rule |")
    print("|---|---|---|---|" + "---|" * len(args.threads))
    for name in args.encoders:
        shape = SHAPES.get(name, (3, 32, 32))
        encoder = build_encoder(name, shape)
        model = nn.Sequential(encoder, nn.Linear(encoder.out_features, 10))
        for batch in args.batches:
            inputs, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
            work = batch * work_of(encoder, inputs[:1])
            (once,) = step_times(model, inputs, labels, 1, 1)
            steps = max(1, min(100, int(args.seconds / once)))
            taken: dict[int, list[float]] = {threads: [] for threads in args.threads}
            for _ in range(args.repetitions):
                for threads in args.threads:
                    taken[threads] += step_times(model, inputs, labels, threads, steps)
            found = {threads: (statistics.median if args.median else min)(times) for threads, times in taken.items()}
            gains = "".join(f" {found[1] / found[n]:.2f} |" for n in args.threads[1:])
            rule = threads_for_work(work)
            print(f"| {name} | {batch} | {work / 1e9:.4f} | {1000 * found[1]:.2f} |{gains} {rule} |", flush=True)


if __name__ == "__main__":
    main()
