"""A data module whose items have become more or fewer since they were divided among clients."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop, federate
from pfl_lightning.datamodules.adapters.stages import warn_of_other_items
from pfl_lightning.methods import FedAvg

SAYS = "has 60 training items now, but clients keep the 40 that were divided"


def items(number: int) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return list(TensorDataset(torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES))


class Growing(L.LightningDataModule):
    def __init__(self, number: int = 40) -> None:
        super().__init__()
        self.number = number

    def setup(self, stage: str) -> None:
        torch.rand(1)
        self.items = items(self.number)

    def train_dataloader(self) -> Any:
        return DataLoader(self.items, 8)

    def val_dataloader(self) -> Any:
        return DataLoader(items(20), 8)

    def test_dataloader(self) -> Any:
        return DataLoader(items(20), 8)


def fit(loop: Any, module: Any, *data: Any) -> None:
    quiet_trainer(1, loop).fit(module, *data)


def test_a_further_fit_of_a_grown_data_module_warns():
    module, data, loop = Net(), Growing(), FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    fit(loop, module, data)
    own = data.items
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*training items now")
        fit(loop, module, data)
    data.number = 60
    with pytest.warns(UserWarning, match=f"Growing {SAYS}.*new instance"):
        fit(loop, module, data)
    assert data.items is own  # which the clients have
    assert len(loop.data.client_data(0).train) == 20
    fit(loop, module, Growing(60))
    assert len(loop.data.client_data(0).train) == 30


def test_asking_draws_nothing_and_changes_nothing():
    data = Growing()
    data.setup("fit")
    own, state = data.items, torch.get_rng_state()
    warn_of_other_items(data, [own], [40], None)
    assert torch.equal(torch.get_rng_state(), state)
    assert data.items is own
    assert data.trainer is None


def test_a_data_set_that_grows_in_place_warns():
    federation, data = federate(Net(), DataLoader(own := items(40), 8), FedAvg, num_clients=2, seed=0)
    quiet_trainer(1).fit(federation, datamodule=data)
    own += items(20)
    with pytest.warns(UserWarning, match=f"the training loader {SAYS}"):
        quiet_trainer(1).fit(federation, datamodule=data)


def test_a_data_module_that_cannot_be_asked_again_goes_on():
    class Once(Growing):
        def setup(self, stage: str) -> None:
            if hasattr(self, "items"):
                raise RuntimeError("it is set up")
            super().setup(stage)

        test_dataloader = L.LightningDataModule.test_dataloader

    module, data, loop = Net(), Once(), FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    fit(loop, module, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*training items now")
        fit(loop, module, data)
    assert sum(len(loop.federation.data.client_data(client).train) for client in range(2)) == len(data.items)
