"""Time of a training step of the encoders in the channels-last layout and in torch's default layout.

python benchmarks/encoders.py

One step is a forward and a backward pass over 50 color images with cross entropy and a step of SGD. The shortest and
the median of the repetitions, the layouts in alternation. All encoders here use channels last, but ResNet-18 with its
ImageNet stem for images of 32 x 32 and less.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.encoders import build_encoder

LAYOUTS = {"channels last": torch.channels_last, "default": torch.contiguous_format}
ENCODERS = ["resnet18", "resnet18_small", "shufflenet_v2", "googlenet", "small_alexnet", "dcpfl_cnn1", "fedproto_cnn"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """Seconds of one training step."""
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    return time.perf_counter() - start


def measure(name: str, side: int, batch: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each repetition in each layout."""
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    models = {}
    for layout, memory_format in LAYOUTS.items():
        encoder = build_encoder(name, (3, side, side)).to(memory_format=memory_format)
        models[layout] = nn.Sequential(encoder, nn.Linear(encoder.out_features, 10))  # type: ignore[arg-type]
    optimizers = {layout: torch.optim.SGD(model.parameters(), lr=0.01) for layout, model in models.items()}
    times: dict[str, list[float]] = {layout: [] for layout in models}
    for repetition in range(repetitions + 1):
        for layout, model in models.items():
            taken = step(model, optimizers[layout], images, labels)
            if repetition:  # the first one warms up
                times[layout].append(1000 * taken)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", nargs="+", default=ENCODERS)
    parser.add_argument("--sides", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, torch {torch.__version__}\n")
    print("| encoder | side | channels last, ms: shortest, median | default, ms: shortest, median |\n|---|---|---|---|")
    for name in args.encoders:
        for side in args.sides:
            times = measure(name, side, args.batch, args.repetitions)
            cells = [f"{min(taken):.0f}, {statistics.median(taken):.0f}" for taken in times.values()]
            print(f"| {name} | {side} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
