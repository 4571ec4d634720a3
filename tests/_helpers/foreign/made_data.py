"""Small made data that several projects share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Dictionaries(Dataset):
    """Items with a name for each tensor."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {name: values[place] for name, values in self.tensors.items()}


def pictures(items: int, seed: int, channels: int = 3, size: int = 16, classes: int = 2) -> tuple[Tensor, Tensor]:
    """Noise, brighter in the higher classes."""
    targets = torch.arange(items) % classes
    noise = torch.randn(items, channels, size, size, generator=torch.Generator().manual_seed(seed))
    return noise + 2.0 * targets[:, None, None, None], targets


def masks(inputs: Tensor) -> Tensor:
    """Where a picture's first channel is bright."""
    return (inputs[:, 0] > 0.5).long()


def loaders(make: Callable[[int, int], Dataset[Any]], batch_size: int = 6, **options: Any) -> dict[str, Any]:
    """36 items for training, 12 for validation, in their own order."""
    return {
        "train_dataloaders": DataLoader(make(36, 1), batch_size=batch_size, **options),
        "val_dataloaders": DataLoader(make(12, 2), batch_size=batch_size, **options),
    }


def labeled_pictures(items: int, seed: int) -> Dataset[Any]:
    """Pairs (picture, class)."""
    return TensorDataset(*pictures(items, seed))
