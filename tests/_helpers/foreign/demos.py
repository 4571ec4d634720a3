"""The modules that Lightning itself brings."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from _helpers.foreign.project import Made, Project


def boring() -> Made:
    """Its steps log nothing; its validation step returns a dictionary."""
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    return BoringModel(), {"datamodule": BoringDataModule()}


def older_boring() -> Made:
    """The same of the package pytorch_lightning."""
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    return BoringModel(), {"datamodule": BoringDataModule()}


def own_loaders() -> Made:
    """A module that brings its own loaders, and no other data."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    return BoringModel(), {}


def transformer() -> Made:
    """A language model without a validation step, and with a step that needs positions as they are."""
    from lightning.pytorch.demos.transformer import LightningTransformer

    class Offline(LightningTransformer):
        def prepare_data(self) -> None:
            """Downloads nothing."""

    words = torch.randint(50, (24, 2, 10), generator=torch.Generator().manual_seed(0))
    texts = TensorDataset(words[:, 0], words[:, 1])
    return Offline(vocab_size=50), {"train_dataloaders": DataLoader(texts, batch_size=8)}


def manual() -> Made:
    """A module that steps by itself."""
    from lightning.pytorch.demos.boring_classes import BoringDataModule, ManualOptimBoringModel

    return ManualOptimBoringModel(), {"datamodule": BoringDataModule()}


def _demo(module: str, data: str, make: Any, **options: Any) -> Project:
    return Project("demo", "lightning", module, data, make, ("lightning",), monitor=None, **options)


PROJECTS = [
    _demo("BoringModel", "BoringDataModule", boring),
    _demo("BoringModel, own loaders", "its train_dataloader", own_loaders),
    _demo("ManualOptimBoringModel", "BoringDataModule", manual),
    _demo("LightningTransformer", "(token ids, token ids)", transformer, head="model.decoder"),
    Project(
        "demo",
        "pytorch-lightning",
        "BoringModel",
        "BoringDataModule",
        older_boring,
        ("pytorch_lightning",),
        monitor=None,
    ),
]
