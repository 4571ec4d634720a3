"""Workers of the user's loaders in the local fits of a federation."""

import multiprocessing
import os
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.datamodules import DirichletOverClients
from pfl_lightning.methods import FedAvg, FedPer


class Items(Dataset):
    """Items that say which process has read them."""

    def __init__(self, number: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.inputs, self.targets = torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, place: int) -> Any:
        return self.inputs[place], self.targets[place], os.getpid()


class Data(L.LightningDataModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def train_dataloader(self) -> Any:
        return DataLoader(Items(30, 1), 4, shuffle=True, **self.options)

    def val_dataloader(self) -> Any:
        return DataLoader(Items(18, 2), 4, **self.options)


class Noting(Net):
    """Notes which processes have read its batches, on the class, since clients train copies."""

    seen: set[int]
    fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.update(batch[2].tolist())
        if self.fails and len(self.seen) and batch_idx == 1:
            raise self.fails
        return super().training_step(batch, batch_idx)


@pytest.fixture
def noting(monkeypatch):
    monkeypatch.setattr(Noting, "seen", set(), raising=False)
    return Noting


def fitted(data: Any, module: Any, **options: Any) -> Any:
    federation, data = federate(module, data, FedAvg, num_clients=3, seed=1, epochs=2, **options)
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=data)
    return dict(federation.global_model().state_dict())


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.parametrize(
    "engine",
    [SequentialEngine(), TrainerEngine(), TrainerEngine(limit_train_batches=1)],
    ids=["sequential", "trainer", "limited"],
)
def test_the_same_processes_serve_all_clients_and_rounds(noting, engine):
    before = children()
    expected = fitted(Data(), noting(), engine=engine)
    assert noting.seen == {os.getpid()}
    noting.seen.clear()
    assert_same(fitted(Data(num_workers=1), noting(), engine=engine), expected, atol=0.0)
    assert len(noting.seen) == 1
    assert os.getpid() not in noting.seen
    assert children() <= before


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_processes_end_when_a_run_does(noting, monkeypatch, error):
    before = children()
    monkeypatch.setattr(Noting, "fails", error)
    with pytest.raises((ZeroDivisionError, SystemExit, KeyboardInterrupt)):
        fitted(Data(num_workers=1), noting())
    assert noting.seen.isdisjoint({os.getpid()})
    assert children() <= before


class Stream(IterableDataset):
    """Items of an unknown number."""

    def __init__(self, own: TensorDataset) -> None:
        self.own = own

    def __iter__(self) -> Any:
        return iter(self.own)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_streams_of_unknown_length_count_what_they_gave(engine):
    def weights(wrap: Any) -> Any:
        own = [TensorDataset(*(t[: 9 + 6 * n] for t in Items(21, n).__dict__.values())) for n in (1, 2)]
        loaders = [DataLoader(wrap(items), 4) for items in own]
        options = {"train_dataloaders": loaders, "val_dataloaders": [DataLoader(Items(6, 3), 3)] * 2}
        federation, data = federate(Net(), method=FedPer, seed=1, engine=engine(), head="fc", **options)
        trainer = quiet_trainer(2)
        trainer.fit(federation, datamodule=data)
        return dict(federation.global_model().state_dict())

    assert_same(weights(Stream), weights(lambda own: own), atol=0.0)


class Unread(Dataset):
    """Items that must not be read before the first round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, place: int) -> Any:
        raise AssertionError(f"item {place} is read")


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"sampler": range(20)}, {"batch_sampler": [[0, 1], [2]]}])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.filterwarnings("ignore:train_dataloader. of each batch")
def test_no_item_is_read_to_divide_evenly(options, several):
    loader = DataLoader(Unread(20), **options)
    loaders = {"a": loader, "b": loader} if several else loader
    val = [DataLoader(Unread(9))] * 2
    _, data = federate(Net(), method=FedAvg, train_dataloaders=loaders, val_dataloaders=val, num_clients=3)
    data.setup("fit")
    assert len(data.client_data(0).train) > 0
    silos = federate(Net(), [loader, Unread(8)], FedAvg)[1]
    silos.setup("fit")
    assert len(silos.client_data(0).train) > 0


def test_classes_of_every_loader_are_used():
    def labels(item: Any) -> int:
        return int(item[1])

    loaders = {"a": DataLoader(Items(60, 1), 4), "b": DataLoader(Items(30, 2), 4)}
    rule = DirichletOverClients(3, alpha=0.2, seed=1)
    _, data = federate(Net(), None, FedAvg, rule, labels=labels, train_dataloaders=loaders)
    data.setup("fit")
    counts = [[part.class_counts(CLASSES) for part in data.client_data(c).train.parts] for c in range(3)]
    assert sum(int(own[1].sum()) for own in counts) == 30
    assert any(int(own[0].max()) > 2 * int(own[0].min()) for own in counts)
