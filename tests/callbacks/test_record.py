"""The record of a fit: what evaluations, interrupted rounds, slow evaluations and other fits must leave alone."""

import csv
import time
from functools import partial

import lightning as L
import pytest
from _helpers.results import valid
from _helpers.toy import WEIGHTS_ONLY, Toy, quiet_trainer, run, tiny_encoder
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter, results_table
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.engines import SequentialEngine
from pfl_lightning.errors import CheckpointError
from pfl_lightning.fit.tasks import EvaluationResult
from pfl_lightning.methods import FedAvg
from pfl_lightning.metrics import EvalMetrics


def federation(engine=None):
    return Federation(partial(FedAvg, lr=0.3, epochs=1), tiny_encoder, seed=1, engine=engine)


def test_the_test_of_an_earlier_round_changes_nothing_of_the_fit(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    loop, writer, fitted = FederatedLoop(), ResultsWriter(str(tmp_path)), federation()
    trainer = quiet_trainer(4, loop, writer, saver, enable_checkpointing=True)
    trainer.fit(fitted, datamodule=Toy())
    table, results = results_table(trainer), valid(tmp_path / "results.json")
    for _ in range(2):
        trainer.test(fitted, datamodule=Toy(), ckpt_path=str(tmp_path / "epoch=1.ckpt"), verbose=False, **WEIGHTS_ONLY)
        assert valid(tmp_path / "test.json")["accuracy"]["last"]["round"] == 2
        assert results_table(trainer) == table
        assert (loop.rounds, len(writer.history)) == (4, 4)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(fitted, datamodule=Toy())
    longer = valid(tmp_path / "results.json")
    assert [entry["round"] for entry in longer["history"]] == [1, 2, 3, 4, 5]
    assert longer["rounds"] == 5
    assert longer["bytes"]["up"] == results["bytes"]["up"] * 5 / 4


def test_a_test_without_a_fit_knows_the_round_afterwards(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    quiet_trainer(2, FederatedLoop(), saver, enable_checkpointing=True).fit(federation(), datamodule=Toy())
    loop = FederatedLoop()
    checkpoint = str(tmp_path / "epoch=1.ckpt")
    quiet_trainer(2, loop).test(federation(), datamodule=Toy(), ckpt_path=checkpoint, verbose=False, **WEIGHTS_ONLY)
    assert loop.rounds == 2


@pytest.mark.parametrize("counts", [True, False])
def test_a_model_that_another_trainer_has_trained(tmp_path, counts):
    fitted = federation()
    quiet_trainer(3, FederatedLoop()).fit(fitted, datamodule=Toy())
    callbacks = [FederatedLoop()] * counts + [ResultsWriter(str(tmp_path))]
    quiet_trainer(1, *callbacks).test(fitted, datamodule=Toy(), verbose=False)
    found = valid(tmp_path / "test.json")
    assert found["accuracy"]["last"]["round"] == 3
    assert [found["rounds"], found["seconds"], found["bytes"]["up"], found["bytes"]["down"]] == [None] * 4


def test_an_evaluation_is_logged_against_the_round_of_its_model(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    quiet_trainer(3, FederatedLoop(), saver, enable_checkpointing=True).fit(federation(), datamodule=Toy())
    logger = CSVLogger(tmp_path, name="", version="")
    options = {"ckpt_path": str(tmp_path / "epoch=1.ckpt"), "verbose": False, **WEIGHTS_ONLY}
    [found] = quiet_trainer(1, FederatedLoop(), logger=logger).test(federation(), datamodule=Toy(), **options)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [(row["step"], float(row["test_accuracy/mean"])) for row in rows] == [
        ("1", pytest.approx(found["test_accuracy/mean"]))
    ]


class _Interrupts(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 2 and batch_idx == 3:
            raise RuntimeError("stopped")


def test_bytes_of_an_interrupted_round_are_in_no_total(tmp_path):
    with pytest.raises(RuntimeError, match="stopped"):
        run(FedAvg, 4, callbacks=[ResultsWriter(str(tmp_path)), _Interrupts()])
    results = valid(tmp_path / "results.json")
    assert [entry["round"] for entry in results["history"]] == [1, 2]
    for direction in ("up", "down"):
        assert results["bytes"][direction] == sum(entry[f"bytes_{direction}"] for entry in results["history"]) > 0
        assert sum(results["bytes"][f"{direction}_by_kind"].values()) == results["bytes"][direction]


class _Slow(L.Callback):
    def on_validation_epoch_start(self, trainer, pl_module):
        time.sleep(0.5)


def test_seconds_are_without_evaluations(tmp_path):
    start = time.perf_counter()
    run(FedAvg, 2, callbacks=[ResultsWriter(str(tmp_path)), _Slow()])
    results = valid(tmp_path / "results.json")
    assert 0 < results["seconds"] < time.perf_counter() - start - 0.5 * 2
    assert sum(entry["seconds"] for entry in results["history"]) == pytest.approx(results["seconds"])


def test_another_fit_with_the_same_callbacks_counts_from_its_first_round(tmp_path):
    loop, writer, found = FederatedLoop(), ResultsWriter(str(tmp_path)), []
    for _ in range(2):
        quiet_trainer(2, loop, writer).fit(federation(), datamodule=Toy())
        found.append(valid(tmp_path / "results.json"))
    assert [one["rounds"] for one in found] == [2, 2]
    assert found[0]["bytes"] == found[1]["bytes"]


class _SameAccuraciesOfOthers(SequentialEngine):
    """The sum in double precision depends on the order."""

    plan = ((0.3, 0.2, 0.1, 0.0, 0.0), (0.1, 0.2, 0.3, 0.0, 0.0))

    def evaluate(self, tasks, environment):
        for _, task in tasks:
            client = task.context.client
            metrics = EvalMetrics(self.plan[min(task.context.round, 1)][client], 1.0, 10)
            yield EvaluationResult(client, metrics if task.validation is not None else None, metrics)


def test_of_equal_rounds_the_first_is_the_best_as_for_the_checkpoint(tmp_path):
    assert sum(_SameAccuraciesOfOthers.plan[0]) != sum(_SameAccuraciesOfOthers.plan[1])
    trainer = quiet_trainer(2, FederatedLoop(), ResultsWriter(str(tmp_path)))
    trainer.fit(federation(_SameAccuraciesOfOthers()), datamodule=Toy())
    chosen = valid(tmp_path / "results.json")["accuracy"]
    assert (chosen["validation_selected"]["round"], chosen["best_test"]["round"]) == (1, 1)


def test_a_checkpoint_is_of_the_data_that_were_trained_on_last(tmp_path):
    fitted = Federation(FedAvg, "mlp", seed=1)
    for seed in (0, 1):
        trainer = quiet_trainer(1, FederatedLoop())
        trainer.fit(fitted, datamodule=Digits(IID(num_clients=4, samples_per_client=20, seed=seed)))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    for seed in (1, 0):
        data = Digits(IID(num_clients=4, samples_per_client=20, seed=seed))
        go_on, again = quiet_trainer(2, FederatedLoop()), Federation(FedAvg, "mlp", seed=1)
        if seed:
            go_on.fit(again, datamodule=data, ckpt_path=str(tmp_path / "x.ckpt"))
        else:
            with pytest.raises(CheckpointError, match="another partition"):
                go_on.fit(again, datamodule=data, ckpt_path=str(tmp_path / "x.ckpt"))


def test_arguments_are_those_that_the_method_has_however_it_was_made(tmp_path):
    """The command line gives every argument, None among them."""
    found = []
    for name, given in (("python", {}), ("cli", {"batch_norm": None, "eval_model": None, "fine_tune": None})):
        run(partial(FedAvg, epochs=1, **given), callbacks=[ResultsWriter(str(tmp_path / name))])
        found.append(valid(tmp_path / name / "results.json")["method_arguments"])
    assert found[0] == found[1]
    assert (found[0]["batch_norm"], found[0]["fine_tune"]) == ("shared", None)
