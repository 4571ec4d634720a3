"""Time of the personalization stage, after the features, as a ratio to a plain loop that fits the same heads.

    python benchmarks/personalization.py

Every client fits a linear head on 512 features for ten epochs and is tested. The encoder passes its inputs on, which
are the features, so that their computation is left out; the plain loop draws batches by `randperm` and steps torch's
SGD. Both in turn, five times; the medians are printed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pfl_lightning import Engine, Federation, SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.methods import LocalOnly
from pfl_lightning.phases import Personalization

FEATURES, CLASSES = 512, 10


class Features(nn.Flatten):
    """Stands in the place of an encoder whose features are known."""

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.out_features = FEATURES


def make_sets(clients: int, samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test features with labels: Gaussians around class means."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, FEATURES, generator=generator)

    def draw() -> TensorDataset:
        labels = torch.randint(0, CLASSES, (clients * samples,), generator=generator)
        noise = 4 * torch.randn(len(labels), FEATURES, generator=generator)
        return TensorDataset((means[labels] + noise).view(-1, 1, 16, 32), labels)

    return draw(), draw()


def plain_loop(train: tuple[Tensor, ...], test: tuple[Tensor, ...], clients: int, settings: Personalization) -> float:
    """Mean test accuracy of heads that plain PyTorch fits."""
    hits = 0
    parts = [[tensor.flatten(1) if tensor.ndim > 1 else tensor for tensor in split] for split in (train, test)]
    shares = [[tensor.chunk(clients) for tensor in part] for part in parts]
    for client in range(clients):
        (inputs, labels), (unseen, truth) = ([column[client] for column in share] for share in shares)
        head = nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(head.parameters(), settings.lr, settings.momentum)
        for _ in range(settings.epochs):
            for batch in torch.randperm(len(inputs)).split(settings.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            hits += int((head(unseen).argmax(dim=1) == truth).sum())
    return hits / len(test[1])


class Timer(L.Callback):
    """Seconds of the test loop."""

    seconds = 0.0

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self._start


def stage(engine: Engine, data: FromDatasets, settings: Personalization) -> tuple[float, float]:
    """Seconds and mean test accuracy of the stage."""
    federation, timer = Federation(LocalOnly, Features, engine, seed=0), Timer()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[FederatedLoop(), timer],
    )
    with federation.personalized(settings):
        trainer.test(federation, datamodule=data, verbose=False)
    return timer.seconds, float(trainer.callback_metrics["test_accuracy/mean"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=300, help="of a client, for training and for the test")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = Personalization()
    train, test = make_sets(args.clients, args.samples)
    data = FromDatasets(train=train, test=test, partition=IID(args.clients), validation_share=0.0, normalize=False)
    print(f"{date.today()}, {platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    print(f"{args.clients} clients, {args.samples} samples, {settings.epochs} epochs")
    print("| engine | seconds | plain loop, s | ratio (range) | accuracy | plain loop's |")
    print("|---|---|---|---|---|---|")
    engines = {"SequentialEngine": SequentialEngine, "VectorizedEngine": lambda: VectorizedEngine(args.clients)}
    for name, make in engines.items():
        rows = []
        for repetition in range(args.repetitions + 1):  # the first warms up
            start = time.perf_counter()
            plain = plain_loop(train.tensors, test.tensors, args.clients, settings)
            plain_seconds = time.perf_counter() - start
            seconds, accuracy = stage(make(), data, settings)
            if repetition:
                rows.append((seconds, plain_seconds, seconds / plain_seconds, accuracy, plain))
        columns = list(zip(*rows, strict=True))
        middle = [statistics.median(column) for column in columns]
        print(
            f"| {name} | {middle[0]:.2f} | {middle[1]:.2f} | {middle[2]:.2f} ({min(columns[2]):.2f} to "
            f"{max(columns[2]):.2f}) | {100 * middle[3]:.1f} | {100 * middle[4]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
