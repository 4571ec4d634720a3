"""Modules that bring their own loaders, and stages with several of them."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine, federate
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg

ENGINES = [SequentialEngine, TrainerEngine]


def samples(number: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES)


class WithLoaders(Net):
    """The project's loaders in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.own = Data()
        self.own.setup(stage)
        self.tests_ran = 0

    def train_dataloader(self) -> Any:
        assert self.trainer.max_epochs == 2
        return self.own.train_dataloader()

    def test_dataloader(self) -> Any:
        return self.own.test_dataloader()


def fitted(module: Any, *given: Any, **options: Any) -> Any:
    federation, data = federate(module, *given, method=FedAvg, seed=1, **options)
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=data)
    return federation, data, trainer


def test_a_module_with_loaders_is_as_good_as_its_data_module():
    expected, *_ = fitted(Net(), Data(), num_clients=3)
    module = WithLoaders()
    federation, data, trainer = fitted(module, num_clients=3)
    assert module.calls == ["prepare", "fit", "test", "fit"]  # for its loaders, and for the layers of clients
    assert_same(dict(federation.global_model().state_dict()), dict(expected.global_model().state_dict()), atol=0.0)
    trainer.test(federation, datamodule=data, verbose=False)
    assert "test_loss" in trainer.callback_metrics


def test_loaders_that_are_given_go_before_those_of_the_module():
    own = Data()
    own.setup("fit")
    _, data, _ = fitted(WithLoaders(), train_dataloaders=DataLoader(samples(30, 1), 4), num_clients=3)
    assert sum(len(data.client_data(client).train) for client in range(3)) == 27  # a tenth is held out
    assert len(data.client_data(0).test.source.dataset) == len(own.test_dataloader().dataset)
    _, data, _ = fitted(WithLoaders(), val_dataloaders=DataLoader(samples(31, 1), 4), num_clients=3)
    assert len(data.client_data(0).validation.source.dataset) == 31
    assert len(data.client_data(0).train.source.dataset) == len(own.train_dataloader().dataset)


@pytest.mark.parametrize("call", ["fit", "test"])
def test_a_trainer_may_be_given_loaders_of_evaluations_alone(call):
    loop = FederatedLoop(method=FedAvg, num_clients=3, seed=1)
    trainer = quiet_trainer(2, loop)
    if call == "fit":
        trainer.fit(WithLoaders(), val_dataloaders=DataLoader(samples(31, 1), 4))
        assert len(loop.data.client_data(0).validation.source.dataset) == 31
    else:
        trainer.test(WithLoaders(), DataLoader(samples(31, 1), 4), verbose=False)
        assert len(loop.data.client_data(0).test.source.dataset) == 31


def test_a_data_module_goes_before_loaders_of_the_module():
    own = Data()
    _, data, _ = fitted(WithLoaders(), own, num_clients=3)
    assert data.datamodule is own


def test_nothing_at_all():
    with pytest.raises(ConfigurationError, match="got nothing, and the module has no train_dataloader"):
        federate(Net(), method=FedAvg, num_clients=3)


class Counting(Net):
    """Steps that count, on the class, since clients train copies."""

    tests = 0

    def test_step(self, batch: Any, batch_idx: int) -> None:
        type(self).tests += 1
        super().test_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ENGINES)
def test_tests_run_when_the_trainer_tests(engine, monkeypatch):
    monkeypatch.setattr(Counting, "tests", 0)
    federation, data, trainer = fitted(Counting(), Data(), num_clients=3, engine=engine())
    assert Counting.tests == 0
    assert not any(name.startswith("test") for name in trainer.callback_metrics)
    trainer.test(federation, datamodule=data, verbose=False)
    assert Counting.tests > 0
    assert {"test_loss", "test_accuracy/mean"} <= set(trainer.callback_metrics)


class TwoSets(L.LightningDataModule):
    """Two validation loaders."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples(30, 1), 5)

    def val_dataloader(self) -> Any:
        return [DataLoader(samples(24, 2), 3), DataLoader(samples(18, 3), 4)]


class Judged(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log(f"loss_of_{dataloader_idx}", loss, add_dataloader_idx=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_validation_loaders(engine):
    federation, _, trainer = fitted(Judged(), [TwoSets()], engine=engine())
    plain = Judged()
    plain.load_state_dict(federation.global_model().state_dict())
    alone = quiet_trainer(1)
    alone.validate(plain, datamodule=TwoSets(), verbose=False)
    for name in ("val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "loss_of_0", "loss_of_1"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(alone.callback_metrics[name]), abs=1e-6)
    assert "val_loss" not in trainer.callback_metrics
    divided, data, trainer = fitted(Judged(), TwoSets(), num_clients=3, engine=engine())
    name, scores = "val_loss/dataloader_idx_1", divided.validation_scores
    sizes = [data.client_data(client).validation.sizes[1] for client in range(3)]
    expected = sum(n * scores[client].logged[name] for client, n in enumerate(sizes)) / sum(sizes)
    assert float(trainer.callback_metrics[name]) == pytest.approx(expected)


class Named(Net):
    """Values with names of their own for each loader, one of both loaders, and one of the whole epoch."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log_dict({f"{('id', 'ood')[dataloader_idx]}_loss": loss}, add_dataloader_idx=False)
        self.log("loss", loss)
        self.seen = float(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("last_seen", self.seen)


class OfOne(L.LightningDataModule):
    """A client with validation loaders of given sizes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        return DataLoader(samples(20, sum(self.sizes)), 5)

    def val_dataloader(self) -> Any:
        return [DataLoader(samples(size, 7 * size), 4) for size in self.sizes]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_weighs_as_much_as_the_loader_that_it_is_of_whatever_its_name(engine):
    federation, _, trainer = fitted(Named(), [OfOne(4, 36), OfOne(32, 8)], engine=engine())
    found, model, scores = trainer.callback_metrics, federation.global_model().eval(), federation.validation_scores
    for number, name in enumerate(["id_loss", "ood_loss"]):
        losses = []
        for sizes in ((4, 36), (32, 8)):
            inputs, classes = samples(sizes[number], 7 * sizes[number]).tensors
            losses.append(F.cross_entropy(model(inputs), classes, reduction="none").detach())
        assert float(found[name]) == pytest.approx(float(torch.cat(losses).mean()), abs=1e-6)
        assert float(found[name]) == float(found[f"loss/dataloader_idx_{number}"])
    both = [scores[client].logged["last_seen"] for client in range(2)]
    assert float(found["last_seen"]) == pytest.approx(sum(both) / 2)  # 40 items each


class Pairs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else batch
        return sum(F.cross_entropy(self(inputs), classes) for inputs, classes in parts)


def combined(kind: str) -> Any:
    one, two = DataLoader(samples(30, 1), 5), DataLoader(samples(18, 3), 4)
    if kind == "list":
        return [one, two]
    return {"one": one, "two": two} if kind == "dict" else CombinedLoader({"one": one, "two": two}, kind)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["list", "dict", "min_size"])
def test_one_client_trains_on_combined_loaders_as_a_trainer_does(kind, engine):
    class Own(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return combined(kind)

        def val_dataloader(self) -> Any:
            return DataLoader(samples(10, 2), 3)

    federation, data, _ = fitted(Pairs(), [Own()], engine=engine(), epochs=2)
    assert data.client_data(0).train.sizes == (30, 18)
    plain = Pairs()
    for _ in range(2):  # the optimizer starts afresh in each round
        quiet_trainer(2).fit(plain, datamodule=Own())
    assert_same(dict(federation.global_model().state_dict()), dict(plain.state_dict()), atol=0.0)


def test_every_data_set_of_combined_loaders_is_divided():
    own = combined("dict")
    _, data, _ = fitted(Pairs(), own, num_clients=3)
    places: Any = [[], []]
    for client in range(3):
        train = data.client_data(client).train
        assert train.sizes[1] == 6
        assert {name: len(batch[1]) for name, batch in next(train.loader(1).batches()).items()} == {"one": 5, "two": 4}
        for found, part in zip(places, train.parts, strict=True):
            found += part.indices.tolist()
    assert sorted(places[1]) == list(range(18))
    assert len(set(places[0])) == len(places[0])


class NoTestStep(Judged):
    test_step = L.LightningModule.test_step


@pytest.mark.parametrize("kind", [Judged, NoTestStep])
def test_several_test_loaders(kind):
    class Tested(TwoSets):
        def test_dataloader(self) -> Any:
            return {"one": DataLoader(samples(9, 4), 3), "two": DataLoader(samples(8, 5), 4)}

    class Testing(kind):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    federation, data = federate(kind() if kind is NoTestStep else Testing(), [Tested()], FedAvg, seed=1)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    plain = Testing()
    plain.load_state_dict(federation.global_model().state_dict())
    results = quiet_trainer(1).test(plain, datamodule=Tested(), verbose=False)
    expected = {name: value for own in results for name, value in own.items()}  # a Trainer has one for each loader
    (got,) = trainer.test(federation, datamodule=data, verbose=False)
    for name in ("test_loss/dataloader_idx_0", "test_loss/dataloader_idx_1"):
        assert got[name] == pytest.approx(expected[name], abs=1e-6)


class LateTests(Data):
    """Its test data are not there when it is fitted."""

    there = False

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "test" and not self.there:
            raise FileNotFoundError("test.csv")


def test_a_fit_needs_no_test_data():
    loop = FederatedLoop(method=FedAvg, num_clients=2, seed=1, head="fc")
    with pytest.warns(UserWarning, match=r"LateTests cannot give its test loader yet \(FileNotFoundError: test.csv\)"):
        quiet_trainer(1, loop).fit(Net(), datamodule=LateTests())
    trainer = quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=2, seed=1, head="fc"))
    with pytest.raises(FileNotFoundError):
        trainer.test(Net(), datamodule=LateTests(), verbose=False)


def test_a_test_needs_test_data():
    module, trainer = Net(), quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=2, seed=1, head="fc"))
    trainer.fit(module, DataLoader(samples(18, 4), 3), DataLoader(samples(9, 4), 3))
    with pytest.raises(ConfigurationError, match=r"trainer\.test needs test data, and no client has any"):
        trainer.test(module, verbose=False)
    assert trainer.test(module, DataLoader(samples(9, 4), 3), verbose=False)[0]["test_loss"] > 0
