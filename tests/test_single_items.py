"""Batch normalization on a batch of one item: refused before the first round, with what helps."""

import lightning as L
import pytest
import torch
from _helpers.toy import quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop, Federation, federate
from pfl_lightning.datamodules import FromDatasets, Partitioner
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg


class Normed(L.LightningModule):
    """Images of 2 channels, normalized with or without their pixels."""

    def __init__(self, spatial: bool = False, frozen: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(2) if spatial else nn.BatchNorm1d(18)
        self.body = nn.Sequential(norm, nn.Flatten()) if spatial else nn.Sequential(nn.Flatten(), norm)
        self.head = nn.Linear(18, 3)
        if frozen:
            norm.eval()

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _items(count):
    return TensorDataset(torch.rand(count, 2, 3, 3), torch.arange(count) % 3)


def _run(sizes, module=None, cohort=1.0, **options):
    loaders = [DataLoader(_items(size), **{"batch_size": 4, "shuffle": True, **options}) for size in sizes]
    tested = [DataLoader(_items(6)) for _ in sizes]
    federation, data = federate(module or Normed(), None, FedAvg, train_dataloaders=loaders, val_dataloaders=tested)
    trainer = quiet_trainer(1, FederatedLoop(cohort=cohort))
    trainer.fit(federation, datamodule=data)
    return trainer


def test_clients_that_no_cohort_has_drawn_are_named_before_the_first_round():
    with pytest.raises(ConfigurationError, match=r"clients 1, 3: .*client 1 has 9 training items in batches of 4"):
        _run([8, 9, 8, 5, 8, 8], cohort=1)
    with pytest.raises(ConfigurationError, match=r"client 2: .*client 2 has 1 training item in.*min_samples"):
        _run([8, 8, 1])


def test_the_advice_is_true():
    with pytest.raises(ConfigurationError, match="set another batch_size, or drop_last to true"):
        _run([6, 9, 17])
    assert _run([6, 9, 17], batch_size=6).current_epoch == 1
    assert _run([6, 9, 17], drop_last=True).current_epoch == 1
    with pytest.raises(ValueError, match=r"lower batch_size to at most 3$"):
        _run([3, 9, 17], drop_last=True)


@pytest.mark.parametrize("module", [Normed(spatial=True), Normed(frozen=True)])
def test_layers_that_take_one_item_are_not_refused(module):
    assert _run([9, 8, 1], module).current_epoch == 1


class Given(Partitioner):
    """Lists of 9 and 6 items."""

    def partition(self, labels):
        return [list(range(9)), list(range(9, 15))]


def test_built_in_methods_are_checked_too():
    class Encoder(nn.Sequential):
        out_features = 4

        def __init__(self, input_shape):
            super().__init__(nn.Flatten(), nn.Linear(18, 4), nn.BatchNorm1d(4))

    data = FromDatasets(Given(2), batch_size=4, train=_items(15), test=_items(9), validation_share=0.0)
    with pytest.raises(ConfigurationError, match=r"client 0: batch normalization .*9 training items in batches of 4"):
        quiet_trainer(1).fit(Federation(FedAvg, Encoder), datamodule=data)
