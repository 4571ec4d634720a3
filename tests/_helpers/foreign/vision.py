"""Networks of timm, segmentation_models_pytorch and MONAI in thin modules: classes, masks, volumes."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from _helpers.foreign.made_data import Dictionaries, labeled_pictures, loaders, masks, pictures
from _helpers.foreign.project import Made, Project


class Classifier(L.LightningModule):
    """A network with a metric object, and a scheduler of warm restarts."""

    def __init__(self, network: Any, classes: int = 2) -> None:
        super().__init__()
        self.network = network
        self.accuracy = MulticlassAccuracy(classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.accuracy(scores, batch[1])
        self.log("val_loss", F.cross_entropy(scores, batch[1]))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)]


class Segmenter(L.LightningModule):
    """A network that gives a mask, trained with a given loss on dictionaries."""

    def __init__(self, network: Any, loss: Any) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch["image"]), batch["mask"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch["image"]), batch["mask"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def masked_pictures(items: int, seed: int) -> Dataset[Any]:
    inputs, _ = pictures(items, seed, size=32)
    return Dictionaries(image=inputs, mask=masks(inputs)[:, None].float())


def volumes(items: int, seed: int) -> Dataset[Any]:
    inputs = torch.randn(items, 1, 8, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Dictionaries(image=inputs, mask=(inputs > 0.5).float())


def timm_classifier() -> Made:
    import timm

    network = timm.create_model("test_vit", pretrained=False, num_classes=2, img_size=16, drop_rate=0.1)
    return Classifier(network), loaders(labeled_pictures)


def smp_unet() -> Made:
    import segmentation_models_pytorch as smp

    network = smp.Unet("tu-test_resnet", 3, encoder_weights=None, decoder_channels=(16, 8, 8), classes=1)
    return Segmenter(network, smp.losses.DiceLoss("binary")), loaders(masked_pictures)


def monai_unet() -> Made:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    network = UNet(3, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), dropout=0.1)
    return Segmenter(network, DiceLoss(sigmoid=True)), loaders(volumes)


def autoencoder() -> Made:
    """Anomalies by reconstruction: a network of MONAI, and items without targets."""
    from monai.networks.nets import AutoEncoder

    network = AutoEncoder(2, in_channels=3, out_channels=3, channels=(4, 8), strides=(2, 2))
    return Reconstruction(network), loaders(unlabeled_pictures)


def unlabeled_pictures(items: int, seed: int) -> Dataset[Any]:
    return TensorDataset(pictures(items, seed)[0])


class Reconstruction(Classifier):
    """Learns to give its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


PROJECTS = [
    Project("images", "timm", "VisionTransformer", "(image, class)", timm_classifier, ("timm",), head="network.head"),
    Project(
        "segmentation",
        "segmentation-models-pytorch",
        "Unet",
        "dictionaries: image, mask",
        smp_unet,
        ("segmentation_models_pytorch",),
    ),
    Project("volumes", "monai", "UNet", "dictionaries: volume, mask", monai_unet, ("monai",)),
    Project("anomalies", "monai", "AutoEncoder", "images without targets", autoencoder, ("monai",)),
]
