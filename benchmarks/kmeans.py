"""Time k-means against scikit-learn's, and what Calibre's terms add to a step of SimCLR.

    python benchmarks/kmeans.py
    python benchmarks/kmeans.py --points 256 --step

Encodings are those of a half-trained encoder: class means as far apart as samples of a class are, through a LeakyReLU.
Prints a Markdown table: seconds of both, measured in alternation, their ratio, and the ratio of the inertias, which
says whether both did the same work; all are medians. With --step another one: a step of SimCLR (forward and backward
pass of a ResNet-18 at 32 x 32 and of the projector over two views, NT-Xent), and the same step with the k-means and the
two losses of Calibre.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import sklearn
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits  # comes with scikit-learn
from torch import Tensor, nn

from pfl_lightning.encoders import build_encoder
from pfl_lightning.functional import (
    fit_kmeans,
    kmeans,
    prototype_contrastive_loss,
    prototype_meta_loss,
    supervised_contrastive_loss,
)

CLUSTERS = 10
ALPHA, TEMPERATURE = 0.3, 0.2


def encodings(points: int, features: int) -> Tensor:
    """Features of ten classes."""
    class_means = torch.randn(CLUSTERS, features)
    labels = torch.randint(CLUSTERS, (points,))
    return nn.functional.leaky_relu(class_means[labels] + torch.randn(points, features))


def seconds(work: Callable[[], float]) -> tuple[float, float]:
    """Wall time of one call, and what it returns."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def pairs(values: Tensor) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Compared implementations: ours and scikit-learn's, each returning the inertia."""
    array = values.numpy()

    def reference(starts: int) -> Callable[[], float]:
        return lambda: float(KMeans(CLUSTERS, n_init=starts).fit(array).inertia_)

    compared = {
        "fit_kmeans, 1 start": (lambda: fit_kmeans(values, CLUSTERS, starts=1).inertia.item(), reference(1)),
        "fit_kmeans, 10 starts": (lambda: fit_kmeans(values, CLUSTERS).inertia.item(), reference(10)),
    }
    if len(values) <= 4096:  # the size of a batch
        compared["kmeans (4 starts of 10 iterations) against 1 start"] = (
            lambda: kmeans(values, CLUSTERS).inertia.item(),
            reference(1),
        )
    return compared


def compare(points: int, features: int, repetitions: int) -> None:
    """Print the rows of one size."""
    values = encodings(points, features)
    for name, (ours, theirs) in pairs(values).items():
        times, reference_times, ratios = [], [], []
        for repetition in range(repetitions + 1):
            (mine, inertia), (other, reference) = seconds(ours), seconds(theirs)
            if repetition:  # the first is a warm-up
                times.append(mine)
                reference_times.append(other)
                ratios.append(inertia / reference)
        ratio = statistics.median(a / b for a, b in zip(times, reference_times, strict=True))
        figures = f"{statistics.median(times):.4f} | {statistics.median(reference_times):.4f} | {ratio:.2f}"
        print(f"| {points} x {features} | {name} | {figures} | {statistics.median(ratios):.4f} |", flush=True)


def step(batch: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """One step without and with Calibre's terms, each returning the loss."""
    encoder = build_encoder("resnet18", input_shape=(3, 32, 32))
    width = encoder.out_features
    projector = nn.Sequential(nn.Linear(width, 2048), nn.ReLU(), nn.Linear(2048, 256))
    images = torch.randn(2 * batch, 3, 32, 32)

    def run(calibre: bool) -> float:
        z = encoder(images)
        p = projector(z)
        loss = supervised_contrastive_loss(torch.stack(p.chunk(2), dim=1), None, TEMPERATURE)
        if calibre:
            labels = kmeans(z, CLUSTERS).assignment.chunk(2)
            meta = prototype_meta_loss(*z.chunk(2), *labels, CLUSTERS)
            loss = loss + ALPHA * (meta + prototype_contrastive_loss(*p.chunk(2), *labels, CLUSTERS))
        loss.backward()
        encoder.zero_grad()
        projector.zero_grad()
        return loss.item()

    return lambda: run(False), lambda: run(True)


def compare_steps(batch: int, repetitions: int) -> None:
    """Print the table of the steps."""
    plain, calibre = step(batch)
    times = [(seconds(plain)[0], seconds(calibre)[0]) for _ in range(repetitions + 1)][1:]
    values = torch.randn(2 * batch, 512)
    alone = statistics.median(seconds(lambda: kmeans(values, CLUSTERS).inertia.item())[0] for _ in range(20))
    one, other = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print("\n| batch | SimCLR (s) | Calibre(SimCLR) (s) | ratio | of it k-means (s) |\n|---:|---:|---:|---:|---:|")
    print(f"| {batch} | {one:.3f} | {other:.3f} | {ratio:.3f} | {alone:.4f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=[256, 50_000])
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step", action="store_true", help="also time a step with Calibre's terms")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    versions = f"torch {torch.__version__}, scikit-learn {sklearn.__version__}"
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, {versions}, medians of {args.repetitions}\n")
    print("| encodings | ours | s | scikit-learn (s) | ratio | inertia, ours / scikit-learn |")
    print("|---|---|---:|---:|---:|---:|")
    with threadpool_limits(args.threads):
        for points in args.points:
            compare(points, args.features, args.repetitions)
        if args.step:
            compare_steps(args.batch, args.repetitions)


if __name__ == "__main__":
    main()
