"""Which items clients are evaluated on: shares, all of them, or none where a plain Trainer would evaluate nothing."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.project import SEED, Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.datamodules import IID, FromFile, FromLoaders
from pfl_lightning.datamodules.adapters.sources import OwnItems
from pfl_lightning.datamodules.adapters.stages import GivenLoaders
from pfl_lightning.drop_in.forms.given_data import with_loaders
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedProto


def items(number: int, seed: int = 0) -> TensorDataset:
    inputs = torch.rand(number, INPUTS, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, torch.arange(number) % CLASSES)


class TrainsAlone(L.LightningModule):
    """No steps but that of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: Any) -> Any:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    configure_optimizers = Net.configure_optimizers
    lr = 0.05


def test_without_steps_for_it_nothing_is_held_out():
    plain, module = TrainsAlone(), TrainsAlone()
    quiet_trainer(2).fit(plain, DataLoader(items(20), 4))
    loop = FederatedLoop(method=FedAvg, num_clients=1, optimizer_state="keep", seed=SEED)
    trainer = quiet_trainer(2, loop, num_sanity_val_steps=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*(nothing is known|held out)")
        trainer.fit(module, DataLoader(items(20), 4))
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in plain.state_dict().items())
    assert "test_accuracy/mean" in trainer.test(module, DataLoader(items(9, 1), 4), verbose=False)[0]
    loop = FederatedLoop(method=FedProto, num_clients=2, seed=SEED)  # which evaluates clients itself
    quiet_trainer(1, loop).fit(TrainsAlone(), DataLoader(items(40), 4))
    assert len(loop.data.client_data(0).test) > 0


class Ranked(Net):
    """A validation that needs the whole set, in its order."""

    def on_validation_epoch_start(self) -> None:
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0])

    def on_validation_epoch_end(self) -> None:
        whole = torch.cat(self.seen)
        if not np.array_equal(whole, items(11, 1).tensors[0]):
            raise ValueError(f"{len(whole)} of 11")
        self.log("rank", float(self(whole).argmax(1).float().mean()))


def test_every_client_may_be_evaluated_on_all_items():
    loaders = DataLoader(items(30), 4), DataLoader(items(11, 1), 4)
    with pytest.raises(ValueError, match="of 11") as error:
        quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=3, seed=SEED)).fit(Ranked(), *loaders)
    assert "shared_evaluation=True" in error.value.__notes__[0]
    loop = FederatedLoop(method=FedAvg, num_clients=3, seed=SEED, shared_evaluation=True)
    trainer, module = quiet_trainer(1, loop), Ranked()
    trainer.fit(module, *loaders)
    assert "rank" in trainer.callback_metrics
    (found,) = trainer.test(module, DataLoader(items(10, 2), 4), verbose=False)
    whole = F.cross_entropy(module(items(10, 2).tensors[0]), items(10, 2).tensors[1])
    assert found["test_loss"] == pytest.approx(whole.item())


class Weighted(Net):
    """A weight by the number of items, as variational networks have."""

    seen: ClassVar[list[tuple[int, str]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = self.trainer.train_dataloader.dataset
        self.seen.append((len(own), own.name))
        assert all(any(torch.equal(item[0], one[0]) for one in own) for item in zip(*batch, strict=True))
        return super().training_step(batch, batch_idx)


def test_the_data_set_of_a_clients_loader_has_its_items_alone():
    whole = items(20)
    whole.name = "whole"
    for clients, count in ((2, 10), (1, 20)):
        Weighted.seen.clear()
        loop = FederatedLoop(method=FedAvg, num_clients=clients, seed=SEED)
        quiet_trainer(1, loop, limit_val_batches=0).fit(Weighted(), DataLoader(whole, 4), DataLoader(items(6, 1), 4))
        assert {name for _, name in Weighted.seen} == {"whole"}
        sizes = {len(loop.data.client_data(client).train) for client in range(clients)}
        assert {size for size, _ in Weighted.seen} == sizes
        assert max(sizes) <= count


def test_targets_of_a_clients_loader_are_its_own():
    whole = items(20)
    whole.targets = torch.arange(20)
    part = OwnItems(whole, [3, 5])
    assert part.targets.tolist() == [3, 5]
    whole.targets = list(range(20))
    assert part.targets == [3, 5]
    whole.targets = Series({number: 19 - number for number in range(20)})
    assert part.targets == [16, 14]


class Series(dict):
    """As of pandas: looked up by its index, and by places with ``iloc``."""

    @property
    def iloc(self) -> Any:
        values = list(self.values())

        class Places:
            def __getitem__(self, places: list[int]) -> list[int]:
                return [values[place] for place in places]

        return Places()


class Doubling(L.LightningDataModule):
    """Its hook changes what its own loaders give, and nothing else."""

    def train_dataloader(self) -> Any:
        return DataLoader(items(20), 4)

    def test_dataloader(self) -> Any:
        return DataLoader(items(10, 2), 4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]


def test_a_later_loader_has_no_hooks_of_the_data_module():
    loop, module = FederatedLoop(method=FedAvg, num_clients=1, seed=SEED), Net()
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, datamodule=Doubling())
    inputs, classes = items(10, 2).tensors
    (found,) = trainer.test(module, DataLoader(items(10, 2), 4), verbose=False)
    assert found["test_loss"] == pytest.approx(F.cross_entropy(module(inputs), classes).item())
    (found,) = trainer.test(module, datamodule=Doubling(), verbose=False)
    assert found["test_loss"] == pytest.approx(F.cross_entropy(module(2 * inputs), classes).item())


def test_the_items_of_a_later_loader_are_not_those_that_a_file_lists_of_another(tmp_path):
    own = GivenLoaders(DataLoader(items(20), 4), DataLoader(items(10, 1), 4))
    division = FromLoaders(IID(2, seed=3), datamodule=own)
    division.setup()
    division.save_partition(tmp_path / "partition.npz")
    data = FromLoaders(FromFile(tmp_path / "partition.npz"), datamodule=own)
    data.setup()
    found = [with_loaders(each, {"test_dataloaders": DataLoader(items(20, 2), 4)}) for each in (division, data)]
    by_rule, by_file = ([one.client_data(client).test.indices for client in range(2)] for one in found)
    assert [len(own) for own in by_file] == [len(own) for own in by_rule]
    assert torch.cat(by_file).max() > 10  # of the 20 items


def test_held_out_items_count_for_a_later_loader():
    """As for one that is known before: a client has as many test items as it has others, if there are enough."""
    own = GivenLoaders(DataLoader(items(60), 4))
    data = FromLoaders(IID(2, seed=3), datamodule=own, validation_share=0.2)
    data.setup()
    later = with_loaders(data, {"test_dataloaders": DataLoader(items(200, 1), 4)})
    for client in range(2):
        parts = later.client_data(client)
        assert len(parts.validation)
        assert len(parts.test) == len(parts.train) + len(parts.validation)


def test_a_shared_evaluation_needs_a_loader():
    loop = FederatedLoop(method=FedAvg, num_clients=2, shared_evaluation=True)
    with pytest.raises(ValueError, match="but there are none"):
        quiet_trainer(1, loop).fit(Net(), DataLoader(items(30), 4))
    silos = [DataLoader(items(9), 4), DataLoader(items(9), 4)]
    loop = FederatedLoop(method=FedAvg, datamodule=silos, shared_evaluation=True)
    with pytest.raises(ConfigurationError, match="leave out partition, num_clients, labels and shared_evaluation"):
        quiet_trainer(1, loop).fit(Net(), silos[0])
