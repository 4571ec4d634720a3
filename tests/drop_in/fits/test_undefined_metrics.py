"""Metrics that do not exist for a client are left out, and sums over clients are sums."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from _helpers.project import Net
from _helpers.toy import INPUTS, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.regression import PearsonCorrCoef, R2Score

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.drop_in.fits.logs import undefined_as_nan
from pfl_lightning.methods import FedAvg

ENGINES = pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
SIZES = (9, 30, 17)


class Judged(Net):
    """Logs metrics of the first class; its weights do not move."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.roc, self.late = BinaryAUROC(), BinaryAUROC()
        self.both = MetricCollection([BinaryAveragePrecision(), BinaryAUROC()], prefix="val_")
        self.line, self.r2 = PearsonCorrCoef(), R2Score()
        self.seen, self.most, self.least = SumMetric(), MaxMetric(), MinMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_items", float(len(batch[1])), reduce_fx=sum, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])[:, 0]
        for metric in (self.roc, self.late, self.both):
            metric.update(scores.sigmoid(), (batch[1] == 0).long())
        for metric in (self.line, self.r2):
            metric.update(scores, batch[0][:, 0])
        for metric in (self.most, self.least):
            metric.update(scores)
        self.seen.update(len(scores))
        self.log("val_roc", self.roc, on_epoch=True)
        self.log_dict(self.both)
        self.log("val_line", self.line)
        self.log("val_r2", self.r2)
        self.log("val_most", self.most)
        self.log("val_least", self.least)
        self.log("val_seen", self.seen)
        self.log("val_items", float(len(scores)), reduce_fx="sum")
        self.log("val_top", scores.max(), reduce_fx="max")
        self.log("val_low", scores.min(), reduce_fx=min)

    def on_validation_epoch_end(self) -> None:
        self.log("val_late", self.late.compute())
        self.late.reset()


def parts(first_alone: bool = True) -> list[TensorDataset]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for client, size in enumerate(SIZES):
        y = torch.randint(0, 2, (size,), generator=generator)
        if first_alone and client == 0:
            y[:] = 0
        found.append(TensorDataset(torch.randn(size, INPUTS, generator=generator), y))
    return found


def fit(engine: Any, sets: list[TensorDataset], *callbacks: Any, evaluated: Any = None, rounds: int = 2) -> Any:
    federation, data = federate(
        Judged(),
        None,
        FedAvg,
        train_dataloaders=[DataLoader(own, 8, shuffle=True) for own in sets],
        val_dataloaders=[DataLoader(own, 8) for own in evaluated or sets],
        engine=engine(),
        seed=1,
    )
    trainer = quiet_trainer(rounds, *callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(federation, datamodule=data)
    return federation, {k: float(v) for k, v in trainer.callback_metrics.items()}, [str(w.message) for w in caught]


@ENGINES
def test_a_client_of_one_class_has_no_auroc(engine):
    sets = parts()
    federation, values, said = fit(engine, sets, EarlyStopping("val_roc", mode="max", patience=5))
    module = federation.client_model(0)
    own = [binary_auroc(module(x)[:, 0], (y == 0).long()) for x, y in (s.tensors for s in sets[1:])]
    mean = sum(size * float(value) for size, value in zip(SIZES[1:], own, strict=True)) / sum(SIZES[1:])
    for name in ("val_roc", "val_late", "val_BinaryAUROC"):
        assert values[name] == pytest.approx(mean)
        assert values[f"{name}/clients"] == 2
        assert sum(text.startswith(f"{name} is undefined (NaN) for client 0:") for text in said) == 1
    assert "val_line/clients" not in values
    assert federation.evaluation.validation_scores.keys() == {0, 1, 2}
    assert math.isnan(federation.evaluation.validation_scores[0].logged["val_roc"])
    assert sum("No negative samples" in text for text in said) == 1  # what torchmetrics says is shown


@ENGINES
def test_a_client_of_one_sample_has_no_correlation(engine):
    sets = parts(first_alone=False)
    one = TensorDataset(*(t[:1] for t in sets[0].tensors))
    federation, values, _ = fit(engine, sets, evaluated=[one, *sets[1:]])
    for name in ("val_line", "val_r2"):
        own = [federation.evaluation.validation_scores[client].logged[name] for client in (1, 2)]
        mean = sum(size * value for size, value in zip(SIZES[1:], own, strict=True)) / sum(SIZES[1:])
        assert values[name] == pytest.approx(mean)
        assert values[f"{name}/clients"] == 2


@ENGINES
def test_sums_and_extremes_are_those_of_all_clients(engine):
    sets = parts()
    federation, values, _ = fit(engine, sets)
    scores = [federation.client_model(0)(own.tensors[0])[:, 0] for own in sets]
    assert values["val_items"] == values["val_seen"] == values["train_items"] == sum(SIZES)
    top, low = max(float(s.max()) for s in scores), min(float(s.min()) for s in scores)
    for name, wanted in (("val_top", top), ("val_most", top), ("val_low", low), ("val_least", low)):
        assert values[name] == pytest.approx(wanted)


@pytest.mark.parametrize("action", ["ignore", "always"])
def test_values_do_not_depend_on_filters_of_warnings(action):
    module = Judged()
    module.roc.update(torch.tensor([0.1, 0.9]), torch.tensor([1, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with undefined_as_nan(module):
            assert torch.isnan(module.roc.compute())
            assert torch.isnan(module.roc.compute())  # a second time, from what is kept
            assert not torch.isnan(module.late(torch.tensor([0.1, 0.9]), torch.tensor([1, 1])))  # of a batch
        module.roc.reset()
        module.roc.update(torch.tensor([0.1, 0.9]), torch.tensor([1, 1]))
        assert module.roc.compute() == 0.0
        module.roc._computed = None
        warnings.simplefilter("error")
        with undefined_as_nan(module), pytest.raises(UserWarning, match="No negative samples"):
            module.roc.compute()


def test_other_errors_of_a_metric_come_through():
    module = Judged()
    module.roc.compute = lambda: (_ for _ in ()).throw(ValueError("another fault"))
    with undefined_as_nan(module), pytest.raises(ValueError, match="another fault"):
        module.roc.compute()
