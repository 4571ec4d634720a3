"""A tabular model: breast cancer from thirty measurements (scikit-learn's data set)."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


class BreastCancer(L.LightningDataModule):
    """Malignant or benign."""

    def setup(self, stage: str) -> None:
        """Split and standardize."""
        inputs, targets = load_breast_cancer(return_X_y=True)
        train, rest, train_y, rest_y = train_test_split(inputs, targets, test_size=0.4, random_state=0)
        val, test, val_y, test_y = train_test_split(rest, rest_y, test_size=0.5, random_state=0)
        scaler = StandardScaler().fit(train)
        self.train, self.val, self.test = (
            TensorDataset(torch.tensor(scaler.transform(x), dtype=torch.float32), torch.tensor(y))
            for x, y in ((train, train_y), (val, val_y), (test, test_y))
        )

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches."""
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.val, batch_size=64)

    def test_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.test, batch_size=64)


class TabularNet(L.LightningModule):
    """Three layers with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.output = nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores."""
        return self.output(self.body(inputs))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Cross entropy."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Share of right answers."""
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train and test."""
    L.seed_everything(0)
    module, data = TabularNet(), BreastCancer()
    callbacks = [EarlyStopping("val_loss", patience=5)]
    trainer = L.Trainer(
        max_epochs=8, callbacks=callbacks, logger=CSVLogger("runs", name="tabular"), log_every_n_steps=1
    )
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data)


if __name__ == "__main__":
    main()
