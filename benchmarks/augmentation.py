"""Time of strong augmentation of whole batches, as the package does it, and sample by sample in worker processes.

python benchmarks/augmentation.py

An epoch of 2,560 color images of unsigned bytes in batches of 64, two views of each image: crop and scale, flip,
colors, gray (StrongAugmentation), and normalization. Against it the same transforms of torchvision (v2, on tensors) in
a DataLoader with worker processes, which live on from epoch to epoch. Medians over repetitions, in alternation. Where
kornia can be imported, its equivalents on the same batches are timed as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from pfl_lightning.datamodules import BatchTransform, ClientSplit, StrongAugmentation

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
BATCH, VIEWS = 64, 2


class Pairs(Dataset[tuple[Tensor, int]]):
    """Two views of each image, by torchvision."""

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.view = v2.Compose(
            [
                v2.RandomResizedCrop(images.shape[-1], scale=(0.2, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
                v2.RandomGrayscale(0.2),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Views of shape (V, C, H, W) and a class."""
        return torch.stack([self.view(self.images[index]) for _ in range(VIEWS)]), 0


def kornia_epoch(images: Tensor, mode: str) -> Callable[[], None]:
    """An epoch of kornia's equivalents; its crops either cut sample by sample or resample the whole batch."""
    from kornia import augmentation as K

    view = torch.nn.Sequential(
        K.RandomResizedCrop(tuple(images.shape[-2:]), scale=(0.2, 1.0), cropping_mode=mode),
        K.RandomHorizontalFlip(0.5),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.Normalize(MEAN, STD),
    )

    @torch.no_grad()
    def epoch() -> None:
        for rows in torch.randperm(len(images)).split(BATCH):
            batch = images.index_select(0, rows.repeat_interleave(VIEWS)).float().div_(255)
            check(view(batch).unflatten(0, (-1, VIEWS)), images)

    return epoch


def check(views: Tensor, images: Tensor) -> None:
    """Check that a batch is one of float views of the images."""
    assert views.shape == (BATCH, VIEWS, *images.shape[1:]), views.shape
    assert views.dtype == torch.float32, views.dtype


def competitors(images: Tensor, workers: int) -> dict[str, Callable[[], None]]:
    """Everything that is timed, as a function that does one epoch."""
    part = ClientSplit(
        images,
        torch.zeros(len(images), dtype=torch.int64),
        torch.arange(len(images)),
        BatchTransform(MEAN, STD, (StrongAugmentation(),)),
    )
    ours = part.loader(BATCH, generator=torch.Generator().manual_seed(0), shuffle=True, augment=True, views=VIEWS)
    theirs = DataLoader(Pairs(images), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def epoch(loader: object) -> None:
        for views, _ in loader:  # type: ignore[attr-defined]
            check(views, images)

    every = {
        "whole batches": lambda: epoch(ours),
        f"torchvision, DataLoader with {workers} workers": lambda: epoch(theirs),
    }
    if importlib.util.find_spec("kornia"):
        for mode in ("slice", "resample"):
            every[f"kornia, {mode}"] = kornia_epoch(images, mode)
    return every


def seconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2560, help=f"a multiple of {BATCH}")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, {args.workers} workers, {versions}\n")
    print("| pixels | code | seconds an epoch | microseconds a view | times the whole batches |\n|---|---|---|---|---|")
    for size in args.sizes:
        images = torch.randint(0, 256, (args.images, 3, size, size), dtype=torch.uint8)
        ways = competitors(images, args.workers)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for repetition in range(args.repetitions + 1):
            for way, work in ways.items():
                taken = seconds(work)
                if repetition:  # the first one starts the workers and warms up
                    times[way].append(taken)
        # A ratio of neighbors in time: other load on the machine then hits both.
        first = times["whole batches"]
        for way, own in times.items():
            ratio = statistics.median(one / other for one, other in zip(own, first, strict=True))
            median = statistics.median(own)
            each = 1e6 * median / (VIEWS * args.images)
            print(f"| {size} x {size} | {way} | {median:.3f} | {each:.0f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
