"""A user's module with a schedule, own metrics, buffers and attributes that its fits change."""

from __future__ import annotations

from typing import Any

import torch
from _helpers.project import Net
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["Changing"]


class Changing(Net):
    """Its rate decays, its temperature grows, a buffer and a metric count, and batches are normalized."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        torch.manual_seed(3)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.temperature, self.seen_epochs = 1.0, 0
        self.register_buffer("steps", torch.zeros(()))
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log the loss and a metric of the scores at the temperature."""
        scores = self(batch[0]) / self.temperature
        self.steps += 1
        self.accuracy(scores, batch[1])
        loss = F.cross_entropy(scores, batch[1])
        self.log_dict({"train_loss": loss, "train_accuracy": self.accuracy}, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Change plain attributes."""
        self.temperature *= 1.1
        self.seen_epochs += 1

    def configure_optimizers(self) -> Any:
        """Decay the rate after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]
