"""Tutorial: arrays, Datasets, a folder of images, a partition rule and a data module of your own."""

# %% Imports
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_wine, make_moons
from torch.utils.data import TensorDataset

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import (
    IID,
    DirichletOverClients,
    FederatedDataModule,
    FromDatasets,
    ImageFolder,
    Partitioner,
    PartitionError,
    Samples,
)
from pfl_lightning.methods import FedPer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def mean_accuracy(data: FederatedDataModule, encoder: str, rounds: int) -> float:
    """Mean test accuracy over clients after a fit of FedPer."""
    federation = Federation(partial(FedPer, lr=0.05, epochs=2), encoder=encoder, seed=0)
    trainer = L.Trainer(max_epochs=rounds, callbacks=[FederatedLoop()], accelerator="cpu", **QUIET)
    trainer.fit(federation, datamodule=data)
    return float(trainer.callback_metrics["test_accuracy/mean"])


# %% Arrays: a table of 178 wines with 13 measurements each
inputs, targets = load_wine(return_X_y=True)
inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
wines = TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets))

rule = DirichletOverClients(num_clients=4, alpha=0.5, samples_per_client=30)
data = FromDatasets(rule, batch_size=8, train=wines, class_names=["Barolo", "Grignolino", "Barbera"])
print(f"wines: mean test accuracy {mean_accuracy(data, 'mlp', rounds=3):.2f}")
print("training samples of each class at each client:", data.class_counts().tolist())

# %% An image folder: train/<class>/*.png and test/<class>/*.png
random = np.random.default_rng(0)
for part, per_class in (("train", 40), ("test", 10)):
    for name, color in (("blue", (40, 60, 200)), ("green", (40, 180, 60)), ("red", (200, 50, 40))):
        folder = Path("images") / part / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            noise = random.normal(0, 40, (16, 16, 3))
            Image.fromarray((np.array(color) + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")

data = ImageFolder(IID(num_clients=4), batch_size=10, root="images", cache_dir="cache")
print(f"images: mean test accuracy {mean_accuracy(data, 'small_cnn', rounds=2):.2f}")
print("classes:", data.class_names, "shape of an image:", data.input_shape)


# %% A partition rule of your own: every client lacks one class
class AllButOneClass(Partitioner):
    """Client k holds an equal share of every class but class k mod C.

    Args:
        num_clients: Number of clients m.
        seed: Seed of the random choice.
    """

    def partition(self, labels: np.ndarray) -> list[np.ndarray]:
        """Index arrays into ``labels``, one a client, disjoint."""
        num_classes = int(labels.max()) + 1
        if self.num_clients <= num_classes:
            raise PartitionError(f"expected more than {num_classes} clients, got {self.num_clients}")
        order = np.random.default_rng(self.seed).permutation(len(labels))
        parts: list[list[np.ndarray]] = [[] for _ in range(self.num_clients)]
        for label in range(num_classes):
            holders = [client for client in range(self.num_clients) if client % num_classes != label]
            shares = np.array_split(order[labels[order] == label], len(holders))
            for client, share in zip(holders, shares, strict=True):
                parts[client].append(share)
        return [np.sort(np.concatenate(part)) for part in parts]


data = FromDatasets(AllButOneClass(num_clients=6), batch_size=8, train=wines)
print(f"own rule: mean test accuracy {mean_accuracy(data, 'mlp', rounds=3):.2f}")
print("training samples of each class at each client:", data.class_counts().tolist())


# %% A data module of your own: all samples as tensors
class TwoMoons(FederatedDataModule):
    """Points on two half circles.

    Args:
        partition: Rule that assigns the points to clients.
        noise: Standard deviation of the points around the circles.
        options: Further arguments of ``FederatedDataModule``, such as ``batch_size``.
    """

    def __init__(self, partition: Partitioner, *, noise: float = 0.1, **options: Any) -> None:
        super().__init__(partition, **options)
        self.noise = noise

    def load(self) -> Samples:
        """All points; a quarter of them is set aside for tests."""
        points, labels = make_moons(400, noise=self.noise, random_state=0)
        return Samples(torch.tensor(points, dtype=torch.float32), torch.tensor(labels), ("upper", "lower"))


data = TwoMoons(IID(num_clients=4), noise=0.2, batch_size=10)
print(f"own data module: mean test accuracy {mean_accuracy(data, 'mlp', rounds=3):.2f}")
