"""A module that keeps data sets and loaders finds the client's own in their places."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.process_helpers import forked_process_engine
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset, random_split

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedPer, FedProto

CLIENTS, BATCH_SIZE = 4, 5


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(112, INPUTS, generator=draw), torch.arange(112) % CLASSES)


class Keeping(Net):
    """Makes its data in every ``setup``, keeps what it makes, and looks at it in its steps."""

    seen: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012  # of all copies

    def __init__(self) -> None:
        super().__init__()
        self.loaders: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        self.train_set, self.val_set, self.test_set = random_split(samples(), [64, 32, 16])

    def train_dataloader(self) -> Any:
        self.train_loader = DataLoader(self.train_set, BATCH_SIZE, shuffle=True)
        self.in_order = DataLoader(self.train_set, 7)
        self.loaders["train"] = self.train_loader
        return self.train_loader

    def val_dataloader(self) -> Any:
        self.loaders["val"] = [DataLoader(self.val_set, 4)]
        return self.loaders["val"]

    def test_dataloader(self) -> Any:
        self.test_loader = DataLoader(self.test_set, 3)
        return self.test_loader

    def look(self, stage: str) -> None:
        found = {
            "batches": len(self.train_loader),
            "again": len(self.train_dataloader()),
            "in a dictionary": len(self.loaders["train"]),
            "items": len(self.train_set),
            "read": sum(len(batch[0]) for batch in self.train_loader),
            "in order": [len(batch[0]) for batch in self.in_order],
            "validated": sum(len(batch[0]) for batch in self.loaders["val"][0]),
            "validation batches": len(self.val_dataloader()),
        }
        type(self).seen.append((stage, found))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == len(self.train_loader) - 1:
            self.look("fit")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.look("validation")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        type(self).seen.append(("test", {"batches": len(self.test_loader), "items": len(self.test_set)}))
        super().test_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch):
    monkeypatch.setattr(Keeping, "seen", [])


def of_one_client(number: int) -> dict[str, Any]:
    """What a client of 16 training items and so many validation items finds."""
    batches = -(-16 // BATCH_SIZE)
    counts = {"batches": batches, "again": batches, "in a dictionary": batches, "items": 16, "read": 16}
    return {**counts, "in order": [7, 7, 2], "validated": number, "validation batches": -(-number // 4)}


@pytest.mark.parametrize("method", [FedAvg, FedPer, FedProto, Ditto])
def test_it_finds_the_clients_own(method):
    module, trainer = Keeping(), quiet_trainer(2, FederatedLoop(method=method, num_clients=CLIENTS, seed=1))
    trainer.fit(module)
    stages = [stage for stage, _ in Keeping.seen]
    assert stages.count("fit") >= 2 * CLIENTS
    assert stages.count("validation") >= 2 * CLIENTS
    sizes = {len(trainer.datamodule.client_data(client).validation) for client in range(CLIENTS)}
    for _, found in Keeping.seen:
        assert found["validated"] in sizes
        assert found == of_one_client(found["validated"])
    Keeping.seen.clear()
    trainer.test(module, verbose=False)
    parts = [len(trainer.datamodule.client_data(client).test) for client in range(CLIENTS)]
    expected = [{"batches": -(-size // 3), "items": size} for size in parts for _ in range(-(-size // 3))]
    assert [found for _, found in Keeping.seen] == expected


def test_without_inner_trainers_too():
    loop = FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1, engine=SequentialEngine())
    quiet_trainer(1, loop).fit(Keeping())
    assert len(Keeping.seen) == 2 * CLIENTS
    for _, found in Keeping.seen:
        assert found == of_one_client(found["validated"])


class Lengths(Keeping):
    """Logs what it finds, since what a worker process appends stays there."""

    def look(self, stage: str) -> None:
        super().look(stage)
        for name in ("batches", "items", "validated"):
            self.log(f"{stage}_{name}", float(self.seen[-1][1][name]))


def test_in_worker_processes_too(monkeypatch):
    engine = forked_process_engine(monkeypatch, engine=TrainerEngine())
    trainer = quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1, engine=engine))
    trainer.fit(Lengths())
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("validation_")}
    assert (found["validation_batches"], found["validation_items"]) == (4, 16)
    assert found["validation_validated"] <= 16
    assert not Keeping.seen  # here


class Looks(Net):
    """Looks at attributes of its data module, which a Trainer gives it."""

    seen: list[Any] = []  # noqa: RUF012  # of all copies

    def configure_optimizers(self) -> Any:
        data = self.trainer.datamodule
        lengths = [len(data.parts[0]), len(data.parts[1]), len(data.kept), len(data.train_dataloader())]
        type(self).seen.append(("fit", lengths, data.parts[0].dataset.tensors[0].shape[0]))
        return super().configure_optimizers()

    def on_validation_epoch_end(self) -> None:
        data = self.trainer.datamodule
        type(self).seen.append(("validation", [len(data.train_dataloader()), len(data.val_dataloader())]))


class KeepingData(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.parts = random_split(samples(), [64, 48])

    def train_dataloader(self) -> Any:
        self.kept = DataLoader(self.parts[0], BATCH_SIZE, shuffle=True)
        return self.kept

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 4)


def test_attributes_of_the_data_module_are_the_clients_own(monkeypatch):
    monkeypatch.setattr(Looks, "seen", [])
    loop = FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1)
    trainer = quiet_trainer(1, loop)
    trainer.fit(Looks(), datamodule=KeepingData())
    sizes = [len(loop.data.client_data(client).validation) for client in range(CLIENTS)]
    assert Looks.seen[:CLIENTS] == [("fit", [16, size, 4, 4], 112) for size in sizes]
    assert Looks.seen[CLIENTS:] == [("validation", [4, -(-size // 4)]) for size in sizes]
    assert len(loop.data.datamodule.parts[0]) == 64  # the project's own stays


class Reads(Net):
    """Goes through loaders that it was given."""

    def __init__(self, *loaders: DataLoader[Any]) -> None:
        super().__init__()
        self.loaders = loaders
        self.read: list[int] = []

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]

    def on_train_epoch_end(self) -> None:
        shifts = [batch[0].mean() for loader in self.loaders for batch in loader]
        with torch.no_grad():
            self.fc.bias += torch.stack(shifts).sum()


def test_one_client_with_all_items_is_the_plain_run():
    train, other = random_split(samples(), [80, 32])
    loaders = DataLoader(train, BATCH_SIZE), DataLoader(other, 4)
    plain, module = Reads(*loaders), Reads(*loaders)
    quiet_trainer(1).fit(plain)
    quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=1, seed=1)).fit(module)
    assert_same(dict(module.state_dict()), dict(plain.state_dict()), atol=0.0)


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.nothing * 2


def test_a_step_that_fails_while_it_is_traced_is_the_cause():
    trainer = quiet_trainer(1, FederatedLoop(method=FedPer, num_clients=2, seed=1))
    with pytest.raises(ConfigurationError, match=r"the step failed with AttributeError: 'Failing'") as caught:
        trainer.fit(Failing(), DataLoader(samples(), 4))
    assert isinstance(caught.value.__cause__, AttributeError)
