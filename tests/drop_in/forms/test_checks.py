"""What cannot be federated is refused with a reason and a way out."""

import copy
import logging
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.methods import EVERY_METHOD
from _helpers.project import Data, Net, run_project
from _helpers.toy import for_toy, quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.methods import FedAvg, FedClassAvg, FedPAC, FedPer, FedProx
from pfl_lightning.phases import Personalization


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.LazyLinear(3)


class Slashed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterDict({"a/b": torch.zeros(2)})


class NoStep(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "method", "options", "message"),
    [
        (
            nn.Linear(2, 2),
            FedAvg,
            {},
            "expected a LightningModule of lightning or pytorch_lightning that is not yet a federation, got torch.nn",
        ),
        (NoStep(), FedAvg, {}, "NoStep has no training_step"),
        (Lazy(), FedAvg, {}, "more.weight of Lazy has no shape yet"),
        (Slashed(), FedAvg, {}, "'more.a/b' in Slashed has a slash"),
        (Net(), "FedAvgg", {}, "method 'FedAvgg' cannot be found: give a name .* did you mean 'FedAvg'"),
        (Net(), Net, {}, "method must be a class of pfl_lightning.methods"),
        (Net(), partial(FedAvg, 3), {}, "hyper-parameters of .* by name"),
        (Net(), FedPAC, {"lr": 0.1}, "lr: not for a LightningModule"),
        (Net(), FedPAC, {"features": "nothing"}, "Net has no layer features='nothing'; there are body, body.0"),
        (Net(), FedPAC, {"head": ["fc", "body.2"]}, "needs a head that is one layer of Net .*: head= has body.2.bias"),
        (Net(), FedClassAvg, {"head_relu": True}, "head_relu: not for a LightningModule.*its layers are not changed"),
        (Net(), FedAvg, {"features": "body"}, "features='body': FedAvg needs no features"),
        (Net(), FedAvg, {"head": "nothing"}, "head='nothing' matches no parameter"),
        (Net(), FedAvg, {"num_clients": None}, "give either partition, .* got partition=None, num_clients=None"),
        (Net(), FedAvg, {"partition": IID(2)}, "give either partition"),
        (Net(), FedAvg, {"partition": "iid", "num_clients": None}, "give either partition, .* got partition='iid'"),
        (
            Net(),
            FedAvg,
            {"lr": 0.1},
            "lr: not for a LightningModule",
        ),
        (Net(), FedAvg, {"momentum": 0.9, "optimizer": torch.optim.SGD}, "momentum, optimizer: not for"),
        (Net(), FedAvg, {"epoch": 3, "mu": 0.1}, "FedAvg has no option 'epoch'; did you mean 'epochs'"),
        (Net(), FedPer, {"head": ()}, "FedPer needs the head of Net"),
        (Net(), FedAvg, {"head": (), "fine_tune": "head"}, "FedAvg needs the head of Net"),
    ],
)
def test_arguments(module, method, options, message):
    with pytest.raises(ConfigurationError, match=message):
        federate(module, Data(), method, **{"num_clients": 2, **options})


def test_data_that_are_no_data_module():
    with pytest.raises(ConfigurationError, match=r"expected a LightningDataModule, .* got TensorDataset"):
        federate(Net(), TensorDataset(torch.zeros(4, 2)), FedAvg, num_clients=2)
    with pytest.raises(
        ConfigurationError, match=r"expected a LightningDataModule, .* got nothing, and the module has no train"
    ):
        federate(Net(), method=FedAvg, num_clients=2)
    with pytest.raises(ConfigurationError, match=r"method must be a class of pfl_lightning.methods.* got None"):
        federate(Net(), Data(), num_clients=2)
    with pytest.raises(ConfigurationError, match="Digits is already divided among clients"):
        federate(Net(), Digits(IID(2)), FedAvg, num_clients=2)


@pytest.mark.parametrize(("method", "options"), [(FedProx, {"mu": -1.0}), (FedAvg, {"epochs": 0})])
def test_values_are_checked_at_once(method, options):
    with pytest.raises(ValueError, match="must be"):
        federate(Net(), Data(), method, num_clients=2, **options)


@EVERY_METHOD
def test_every_method_applies_or_says_that_it_cannot(method):
    if method.model_agnostic or method.feature_based:
        federation, _ = run_project(for_toy(method), num_clients=2, head="fc")
        assert type(federation.client_model(1)) is Net
    else:
        with pytest.raises(ConfigurationError, match=f"{method.__name__} trains an encoder by its own steps"):
            federate(Net(), Data(), method, num_clients=2)


def test_a_compiled_module_is_trained_as_it_was():
    module = Net()
    with pytest.warns(UserWarning, match="Net is compiled; clients train the module as it was before"):
        federation, _ = run_project(FedAvg, module=torch.compile(module))
    plain = Net()
    run_project(FedAvg, module=plain)
    assert torch.equal(module.fc.weight, plain.fc.weight)
    assert type(federation.client_model(0)) is Net
    inside = Net()
    inside.compile()
    with pytest.warns(UserWarning, match="Net is compiled"):
        run_project(FedAvg, module=inside)
    assert torch.equal(inside.fc.weight, plain.fc.weight)


def test_a_layer_may_be_compiled():
    class Partly(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.compile(self.body, backend="eager")

    module, plain = Partly(), Net()
    federation, _ = run_project(FedPer, module=module, head="fc")
    expected, _ = run_project(FedPer, module=plain, head="fc")
    assert torch.equal(module.body._orig_mod[0].weight, plain.body[0].weight)
    assert set(federation.server.weights.as_state()) == {f"module.body._orig_mod.{n}" for n in plain.body.state_dict()}
    assert torch.equal(federation.client_model(2).fc.weight, expected.client_model(2).fc.weight)


class Silent(Net):
    """Without steps for evaluations."""

    validation_step = L.LightningModule.validation_step
    test_step = L.LightningModule.test_step


class OnlyValidation(Net):
    test_step = L.LightningModule.test_step


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_a_module_without_evaluation_steps_is_judged_by_its_scores(engine):
    judged, trainer = run_project(FedAvg, module=Silent(), engine=engine())
    whole, _ = run_project(FedAvg, engine=engine())
    for client, score in whole.test_scores.items():
        assert judged.test_scores[client].accuracy == score.accuracy
        assert judged.test_scores[client].logged == {}
    assert "test_accuracy/mean" in trainer.callback_metrics
    partly, _ = run_project(FedAvg, module=OnlyValidation(), engine=engine())
    for client, score in whole.test_scores.items():
        assert partly.test_scores[client].logged == pytest.approx(score.logged)


def test_a_module_of_which_nothing_can_be_known_is_named():
    class Odd(Silent):
        def forward(self, inputs: Any) -> Any:
            return {"scores": super().forward(inputs)}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0])["scores"], batch[1])

    with pytest.warns(UserWarning, match="Odd logs nothing in its validation or test step"):
        run_project(FedAvg, module=Odd())


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, inputs: Any) -> Any:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0])[:, 0], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mse", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Lines(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        inputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        self.items = TensorDataset(inputs, inputs @ torch.tensor([1.0, -2.0, 0.5]))

    def train_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=8)


def test_a_regression_has_its_own_values_and_no_accuracy(tmp_path):
    federation, data = federate(Regression(), Lines(), FedProx, num_clients=3, monitor="val_mse", mu=0.1, seed=1)
    trainer = quiet_trainer(2, ResultsWriter(str(tmp_path)))
    trainer.fit(federation, datamodule=data)
    own = np.array([score.logged["val_mse"] for score in federation.validation_scores.values()])
    got = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_mse/")}
    assert got == pytest.approx(
        {"val_mse/mean": own.mean(), "val_mse/std": own.std(), "val_mse/min": own.min(), "val_mse/max": own.max()},
        rel=1e-5,
    )
    assert not [name for name in trainer.callback_metrics if "accuracy" in name]
    assert (tmp_path / "results.json").is_file()
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert "nan" not in (tmp_path / "clients.csv").read_text()


def test_a_loss_that_is_not_finite_leaves_a_client_out():
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("nan") if bool((batch[1] == 4).any()) else 1.0)

    for engine in (SequentialEngine, TrainerEngine):
        with pytest.warns(UserWarning, match=r"left out of the aggregation: client 3, round 1: the loss is nan"):
            federation, trainer = run_project(FedAvg, module=Broken(), engine=engine())
        assert trainer.callback_metrics["train/clients_left_out"] == 1
        assert bool(torch.isfinite(federation.global_model().fc.weight).all())


def test_a_linear_head_on_features_needs_features():
    federation, trainer = run_project(FedAvg)
    told = pytest.raises(FederationError, match=r"'linear' .* FedAvg has no features: use 'head'")
    with told, federation.personalized(Personalization("linear")):
        trainer.test(federation, datamodule=trainer.datamodule, verbose=False)


@pytest.mark.parametrize("train", ["head", "all"])
def test_other_personalizations_apply(train):
    federation, trainer = run_project(FedAvg)
    before = federation.test_scores[0].logged
    with federation.personalized(Personalization(train, epochs=3, lr=0.1)):
        trainer.test(federation, datamodule=trainer.datamodule, verbose=False)
    assert federation.test_scores[0].logged != before


@pytest.mark.parametrize("train", ["head", "all"])
def test_a_personalization_of_a_head_that_cannot_be_traced_asks_for_it(train):
    class Two(Net):
        """Two heads at once."""

        def forward(self, inputs):
            return super().forward(inputs) + self.body[0](inputs)

    federation, trainer = run_project(FedAvg, module=Two())
    told = pytest.raises(
        FederationError, match=r"personalization of the head needs the head of Two.*2 last layers at once"
    )
    with told if train == "head" else nullcontext(), federation.personalized(Personalization(train, epochs=1, lr=0.1)):
        trainer.test(federation, datamodule=trainer.datamodule, verbose=False)


def test_no_head_is_looked_for_where_none_is_needed(caplog):
    with caplog.at_level(logging.INFO, "pfl_lightning"):
        run_project(FedAvg)
    assert "head" not in caplog.text


def test_the_traced_head_is_said_once(caplog):
    with caplog.at_level(logging.WARNING, "pfl_lightning"):
        run_project(FedPer, 2)
    assert caplog.text.count("head of Net: 'fc'") == 1


def test_a_federation_is_no_module_of_its_own():
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2)
    with pytest.raises(ConfigurationError, match=r"not yet a federation, got pfl_lightning.*ModuleFederation"):
        federate(federation, data, FedAvg)
    assert not list(federation.parameters())
    assert isinstance(federation.loop, RoundLoop)


@pytest.mark.parametrize(("labels", "example"), [("topic", "item['topic']"), (1, "item[1]"), ([0, 1], "item['label']")])
def test_labels_are_a_function(labels, example):
    with pytest.raises(ConfigurationError, match="labels must be a function") as refused:
        FederatedLoop(method=FedAvg, num_clients=2, labels=labels)
    assert example in str(refused.value)
    with pytest.raises(ConfigurationError, match="labels must be a function"):
        federate(Net(), Data(), FedAvg, labels=labels)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)


def test_a_fit_leaves_a_module_without_hyperparameters_without_them(caplog):
    """Lightning adds them to a module that is asked for them, and local fits would say that they had changed."""
    run_project(FedAvg, module=Counting(), data=Data(drop_last=True))
    assert "not kept for the client's next" not in caplog.text


def test_a_copied_or_pickled_federation_says_that_it_has_no_data():
    federation, _ = run_project(FedAvg, module=Counting(), data=Data(drop_last=True))
    for other in (copy.deepcopy(federation), pickle.loads(pickle.dumps(federation))):
        assert torch.equal(other.global_model().fc.weight, federation.global_model().fc.weight)
        with pytest.raises(ConfigurationError, match=r"has no Trainer, .*use the one that was fitted"):
            other.client_model(0)
