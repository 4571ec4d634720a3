"""What Lightning records of logged values is not walked through at every call of ``self.log``."""

import pytest
import torch
from _helpers.project import run_project
from _helpers.toy import quiet_trainer
from lightning.pytorch.trainer.connectors.logger_connector import result
from torchmetrics import MeanMetric

from pfl_lightning.drop_in.fits.inner_trainer import keep_results_in_place
from pfl_lightning.methods import FedAvg


@pytest.fixture
def walks(monkeypatch):
    """Names of values whose record Lightning has walked through."""
    found, own = [], result._ResultMetric.to

    def to(self, *args, **kwargs):
        found.append(self.meta.name)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(result._ResultMetric, "to", to)
    return found


def results(in_place):
    trainer = quiet_trainer(1)
    if in_place:
        keep_results_in_place(trainer)
    return trainer.fit_loop.epoch_loop._results


def test_a_local_fit_logs_without_walks(walks):
    run_project(FedAvg, num_clients=2, cohorts=(range(2),), epochs=4)
    assert walks.count("train_loss") <= 2 * 4  # once an epoch, when all values are brought to the host


def test_values_are_those_of_lightning(walks):
    def logged(record):
        metric = MeanMetric()
        for value in (1.0, 2.0, 5.0):
            record.log("training_step", "mean", torch.tensor(value), on_step=True, on_epoch=True, batch_size=3)
            metric.update(value)
            record.log("training_step", "metric", metric, on_epoch=True, metric_attribute="m", batch_size=1)
        return record.metrics(False)

    assert str(logged(results(True))) == str(logged(results(False)))
    assert walks.count("mean") == 3  # those without


def test_results_of_every_loop_are_replaced_once():
    trainer = quiet_trainer(1)
    keep_results_in_place(trainer)
    steps = trainer.fit_loop.epoch_loop
    loops = (steps, steps.val_loop, trainer.validate_loop, trainer.test_loop)
    found = [loop._results for loop in loops]
    assert [each.training for each in found] == [True, False, False, False]
    assert not {type(each) for each in found} & {result._ResultCollection}
    keep_results_in_place(trainer)
    assert all(loop._results is own for loop, own in zip(loops, found, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a value on another device than its record")
def test_a_record_moves_to_its_value_on_cuda():
    record = results(True)
    record.log("training_step", "loss", torch.tensor(1.0, device="cuda"), batch_size=1)
    assert record["training_step.loss"].value.device.type == "cuda"
