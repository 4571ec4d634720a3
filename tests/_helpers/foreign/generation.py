"""A GAN of MONAI's networks and object detection of torchvision: steps that have no accuracy and no plain targets."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from _helpers.foreign.made_data import loaders, pictures
from _helpers.foreign.project import Made, Project


class Adversarial(L.LightningModule):
    """Two networks and two optimizers in turn; ``forward`` takes noise, and there is no validation step."""

    def __init__(self) -> None:
        from monai.networks.nets import Discriminator, Generator

        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator(4, start_shape=(4, 4, 4), channels=(4, 1), strides=(2, 2))
        self.discriminator = Discriminator((1, 16, 16), channels=(4, 8), strides=(2, 2), last_act=None)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_generator)
        made = self(torch.randn(len(real), 4))
        loss = F.softplus(-self.discriminator(made)).mean()
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(made.detach())).mean()
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)], []


def gray(items: int, seed: int) -> Dataset[Any]:
    return TensorDataset(pictures(items, seed, channels=1)[0])


def gan() -> Made:
    return Adversarial(), {"train_dataloaders": loaders(gray)["train_dataloaders"]}


class Boxes(Dataset):
    """Pictures of different sizes with one or two boxes each."""

    def __init__(self, items: int, seed: int) -> None:
        self.items, self.seed = items, seed

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, place: int) -> Any:
        draw = torch.Generator().manual_seed(self.seed + place)
        corners = 8.0 * torch.rand(1 + place % 2, 2, generator=draw)
        boxes = torch.cat([corners, corners + 16], 1)
        picture = torch.rand(3, 32 + place % 3, 40, generator=draw)
        return picture, {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}


def in_lists(items: list[Any]) -> Any:
    return tuple(zip(*items, strict=True))


class Detection(L.LightningModule):
    """Its network gives losses in training mode and boxes in evaluation mode."""

    def __init__(self) -> None:
        from torchvision.models import SqueezeNet
        from torchvision.models.detection import FasterRCNN
        from torchvision.models.detection.rpn import AnchorGenerator

        super().__init__()
        backbone = SqueezeNet("1_1").features[:6]
        backbone.out_channels = 128
        self.network = FasterRCNN(
            backbone,
            num_classes=2,
            rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
            box_head=None,
            min_size=32,
            max_size=40,
            box_detections_per_img=5,
        )

    def forward(self, images: Any, targets: Any = None) -> Any:
        return self.network(list(images), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self(*batch)
        self.log_dict(losses, batch_size=len(batch[0]))
        return sum(losses.values())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self(batch[0])
        missed = [abs(len(own["boxes"]) - len(target["boxes"])) for own, target in zip(found, batch[1], strict=True)]
        self.log("val_missed", float(sum(missed)), batch_size=len(missed))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


def detection() -> Made:
    return Detection(), loaders(Boxes, collate_fn=in_lists)


PROJECTS = [
    Project(
        "generation (GAN)",
        "monai",
        "Generator, Discriminator",
        "images without targets",
        gan,
        ("monai",),
        monitor=None,
    ),
    Project(
        "detection",
        "torchvision",
        "FasterRCNN",
        "lists of images and boxes",
        detection,
        ("torchvision",),
        monitor="val_missed",
        slow=True,
    ),
]
