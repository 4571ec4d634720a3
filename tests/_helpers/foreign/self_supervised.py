"""Self-supervised learning with lightly's heads and losses, as its examples put them together, without validation."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import Dataset

from _helpers.foreign.made_data import loaders, pictures
from _helpers.foreign.project import Made, Project


class Views(Dataset):
    """Two noisy views of each picture, the class and a name, as lightly's data sets give them."""

    def __init__(self, items: int, seed: int) -> None:
        self.inputs, self.classes = pictures(items, seed, size=8)
        draw = torch.Generator().manual_seed(seed)
        self.noise = 0.1 * torch.randn(2, *self.inputs.shape, generator=draw)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> Any:
        views = [self.inputs[place] + noise[place] for noise in self.noise]
        return views, int(self.classes[place]), f"{place}.png"


def backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Contrastive(L.LightningModule):
    """SimCLR."""

    def __init__(self) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        super().__init__()
        self.backbone, self.projection_head = backbone(), SimCLRProjectionHead(8, 8, 4)
        self.criterion = NTXentLoss()

    def forward(self, x: Any) -> Any:
        return self.projection_head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (first, second), _, _ = batch
        loss = self.criterion(self(first), self(second))
        self.log("train_ssl_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class Bootstrap(L.LightningModule):
    """BYOL: a copy that follows by momentum and has no gradient."""

    def __init__(self) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__()
        self.backbone, self.projection = backbone(), BYOLProjectionHead(8, 8, 4)
        self.prediction = BYOLPredictionHead(4, 8, 4)
        self.slow_backbone, self.slow_projection = copy.deepcopy(self.backbone), copy.deepcopy(self.projection)
        deactivate_requires_grad(self.slow_backbone)
        deactivate_requires_grad(self.slow_projection)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Any) -> Any:
        return self.prediction(self.projection(self.backbone(x)))

    def slow(self, x: Any) -> Any:
        return self.slow_projection(self.slow_backbone(x)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.slow_backbone, m=momentum)
        update_momentum(self.projection, self.slow_projection, m=momentum)
        (first, second), _, _ = batch
        return 0.5 * (self.criterion(self(first), self.slow(second)) + self.criterion(self(second), self.slow(first)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def simclr() -> Made:
    data = loaders(Views)
    return Contrastive(), {"train_dataloaders": data["train_dataloaders"]}


def byol() -> Made:
    data = loaders(Views)
    return Bootstrap(), {"train_dataloaders": data["train_dataloaders"]}


def _lightly(name: str, make: Any, **options: Any) -> Project:
    return Project("self-supervised", "lightly", name, "two views", make, ("lightly",), monitor=None, **options)


PROJECTS = [_lightly("SimCLR", simclr), _lightly("BYOL", byol)]
