"""A LightningModule that logs what it counts in evaluations, also in worker processes."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NAMES = ("epoch", "trainer_epoch", "last")


class Data(L.LightningDataModule):
    """The same 24 items for every stage."""

    def _loader(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(24, 4, generator=generator)
        return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class Counting(L.LightningModule):
    """Logs what it counts in each evaluation."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, inputs):
        return self.head(torch.relu(self.body(inputs)))

    def training_step(self, batch, batch_idx):
        counts = {"batches": self.trainer.fit_loop.total_batch_idx, "steps": self.global_step}
        for name, value in (counts | {"epoch": self.current_epoch, "rounds": self.trainer.max_epochs}).items():
            self.log(f"train_{name}", float(value), on_step=False, on_epoch=True)
        return F.cross_entropy(self(batch[0]), batch[1])

    def _note(self, stage):
        last = self.current_epoch + 1 == self.trainer.max_epochs
        for name, value in zip(NAMES, (self.current_epoch, self.trainer.current_epoch, last), strict=True):
            self.log(f"{stage}_{name}", float(value))

    def validation_step(self, batch, batch_idx):
        self._note("val")
        self.log("val_step", float(self.global_step))

    def on_validation_epoch_end(self):
        if (self.current_epoch + 1) % 2 == 0:  # an expensive metric
            self.log("val_every_other", float(self.current_epoch))

    def test_step(self, batch, batch_idx):
        self._note("test")

    def predict_step(self, batch, batch_idx):
        return torch.full((len(batch[0]),), self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Inside(L.Callback):
    """Logs what a callback reads inside an evaluation."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val_of_callback", float(trainer.current_epoch))
