"""Values that a user's module logs, over clients, read back from the event files."""

import lightning as L
import numpy as np
import torch
from _helpers.events import board, events, rounds
from _helpers.toy import quiet_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning.callbacks import FederatedLoop, Inspection
from pfl_lightning.callbacks.inspection.over_clients import bars
from pfl_lightning.methods import FedAvg


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(batch[0])[:, 0], batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_mae", (self.layer(batch[0])[:, 0] - batch[1]).abs().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count):
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=8)


def test_a_regression_has_pictures_of_its_own(tmp_path):
    loop = FederatedLoop(method=FedAvg, num_clients=4, seed=1)
    callbacks = Inspection(every_n_rounds=2).callbacks()
    quiet_trainer(3, loop, *callbacks, logger=board(tmp_path)).fit(Regression(), samples(80), samples(20))
    found = events(tmp_path)
    assert rounds(found, "clients/val_mae") == [0, 1, 2]
    assert rounds(found, "partition") == [0]
    assert {"bytes/up", "bytes/down"} <= set(found.Tags()["scalars"])


def test_values_with_the_names_of_other_pictures_have_their_own(tmp_path):
    class Judged(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("val_accuracy", self.layer(batch[0]).mean())

    loop = FederatedLoop(method=FedAvg, num_clients=4, seed=1)
    callbacks = Inspection(every_n_rounds=2).callbacks()
    quiet_trainer(1, loop, *callbacks, logger=board(tmp_path)).fit(Judged(), samples(80), samples(20))
    assert rounds(events(tmp_path), "clients/logged_val_accuracy") == [0]


def test_a_bar_is_as_high_as_the_clients_value():
    [axes] = bars({0: 1.5, 3: float("nan"), 7: 0.5}, "val_mae", 4).axes
    assert [bar.get_height() for bar in axes.patches] == [1.5, 0.5]
    assert [bar.get_x() + bar.get_width() / 2 for bar in axes.patches] == [0, 2]
    assert np.allclose(axes.lines[0].get_ydata(), 1.0)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "3", "7"]
