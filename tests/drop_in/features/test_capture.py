"""Classes of a batch of a user's data."""

import lightning as L
import pytest
import torch
from _helpers.toy import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import federate
from pfl_lightning.drop_in.features.capture import classes_of_batch
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FD, FedAvg, FedClassAvg, FedPAC, FedProto


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.body(inputs).relu())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=-100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PartlyLabeled(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(0)
        classes = torch.arange(48) % 3
        classes[::7] = -100
        return DataLoader(TensorDataset(torch.randn(48, 4, generator=draw), classes), batch_size=8, shuffle=True)


def fit(method: type) -> L.Trainer:
    federation, data = federate(Net(), PartlyLabeled(), method, num_clients=2, head="fc")
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    return trainer


@pytest.mark.parametrize("method", [FedProto, FedPAC, FD, FedClassAvg], ids=lambda method: method.__name__)
def test_samples_that_the_loss_leaves_out_are_refused_where_classes_are_needed(method):
    with pytest.raises(ConfigurationError, match="class of every sample, 0 or more, got -100"):
        fit(method)


def test_they_are_no_matter_where_classes_are_not_needed():
    assert 0 < float(fit(FedAvg).callback_metrics["train/loss"]) < 5


def test_a_batch_without_samples_has_no_classes():
    assert classes_of_batch((torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), None).tolist() == []
