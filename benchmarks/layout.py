"""Time of FedPAC's CNN in the channels-last layout, which the package uses, and in torch's default layout.

python benchmarks/layout.py

An epoch of forward and backward passes over 600 images of 3 x 32 x 32 in batches of 50, and the forward passes alone in
batches of 100. Medians over repetitions, the layouts in alternation.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
from torch.nn import functional as F

from pfl_lightning.encoders import build_encoder


def seconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    images, labels = torch.randn(600, 3, 32, 32), torch.randint(0, 10, (600,))
    head = torch.nn.Linear(128, 10)
    times: dict[tuple[str, str], list[float]] = {}
    encoders = {
        "channels last": build_encoder("fedpac_cnn", (3, 32, 32)),
        "default": build_encoder("fedpac_cnn", (3, 32, 32)).to(memory_format=torch.contiguous_format),
    }

    def epoch(encoder: torch.nn.Module) -> None:
        for x, y in zip(images.split(50), labels.split(50), strict=True):
            F.cross_entropy(head(encoder(x)), y).backward()

    @torch.no_grad()
    def forward(encoder: torch.nn.Module) -> None:
        for x in images.split(100):
            encoder(x)

    for repetition in range(args.repetitions + 1):
        for layout, encoder in encoders.items():
            for name, work in (("epoch", epoch), ("forward", forward)):
                taken = seconds(lambda work=work, encoder=encoder: work(encoder))  # type: ignore[misc]
                if repetition:  # the first one warms up
                    times.setdefault((name, layout), []).append(taken)
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, torch {torch.__version__}\n")
    print("| layout | forward and backward, ms | forward alone, ms |\n|---|---|---|")
    for layout in encoders:
        row = [1000 * statistics.median(times[name, layout]) for name in ("epoch", "forward")]
        print(f"| {layout} | {row[0]:.0f} | {row[1]:.0f} |")


if __name__ == "__main__":
    main()
