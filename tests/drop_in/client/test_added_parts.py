"""What a local fit adds to a module: steps of a tracker, which are its client's, and layers, which are refused."""

import copy
from typing import Any

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import INPUTS, quiet_trainer
from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricTracker, MinMaxMetric

from pfl_lightning import FederatedLoop
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg


class Tracked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.tracker.update(self(batch[0])[:, 0], batch[1].float())

    def on_validation_epoch_end(self) -> None:
        self.log("best", self.tracker.best_metric())
        self.log("last", self.tracker.compute())
        self.log("steps", float(self.tracker.n_steps))


def fit(module: Any, rounds: int = 2) -> Any:
    trainer = quiet_trainer(rounds, FederatedLoop(method=FedAvg, num_clients=3, seed=0))
    trainer.fit(module, WithValidation())
    return trainer


class WithValidation(Data):
    def val_dataloader(self) -> Any:
        return self.test_dataloader()


def test_a_tracker_has_the_steps_of_its_own_client():
    found = fit(Tracked()).callback_metrics
    assert float(found["steps"]) == 1
    assert float(found["best"]) == float(found["last"]) > 0


class Taught(Net):
    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)


def test_a_layer_that_a_fit_makes_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"Taught has teacher\.0\.bias after its first local fit.*setup or con"
    ):
        fit(Taught())


class Seen(Metric):
    """A metric with an attribute beside its state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.sizes: list[int] = []

    def update(self, inputs: Tensor) -> None:
        self.total += len(inputs)
        self.sizes.append(len(inputs))

    def compute(self) -> Tensor:
        return self.total


class Measured(Net):
    found: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.range, self.seen = MinMaxMetric(MeanMetric()), Seen()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.range.update(self(batch[0]).std())
        self.seen.update(batch[0])

    def on_validation_epoch_end(self) -> None:
        found = {name: float(value) for name, value in self.range.compute().items()}
        Measured.found.append((found, sum(self.seen.sizes), float(self.seen.compute())))


def test_attributes_of_a_metric_are_its_own_clients():
    Measured.found.clear()
    fit(Measured())
    assert len(Measured.found) == 2 * 3
    for values, size, total in Measured.found:
        assert values["min"] == values["max"] == values["raw"]
        assert size == total


class Prepares(Net):
    """Makes a function that holds its layers, in ``prepare_data`` or in ``setup``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def prepare_data(self) -> None:
        self._make("prepare_data")

    def setup(self, stage: str) -> None:
        self._make("setup")

    def _make(self, where: str) -> None:
        if where == self.where:
            self.encode = lambda inputs: self.body(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.encode(inputs))


@pytest.mark.parametrize("where", ["prepare_data", "setup"])
def test_functions_hold_the_layers_of_the_module_that_has_them(where):
    module, plain = Prepares(where), Net()
    for each in (module, plain):
        fit(each)
    assert all(torch.equal(own, other) for own, other in zip(module.parameters(), plain.parameters(), strict=True))
    inputs = torch.ones(2, INPUTS)
    assert torch.equal(module(inputs), plain(inputs))
    with torch.no_grad():
        module.body[0].weight.zero_()
    assert not torch.equal(module(inputs), plain(inputs))
