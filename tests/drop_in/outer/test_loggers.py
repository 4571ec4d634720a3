"""Loggers see one epoch a round, through Lightning's interface and nothing else."""

import csv

import pytest
from _helpers.project import Data, Net, run_project
from _helpers.toy import WEIGHTS_ONLY, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger

from pfl_lightning import federate
from pfl_lightning.methods import FedPer


class Recorder(Logger):
    """What every logger must have, such as those of MLflow and W&B, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.hyperparameters = [], []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        self.hyperparameters.append(params)


def fitted(rounds, *callbacks, **options):
    federation, data = federate(Net(), Data(), FedPer, num_clients=3, seed=1, monitor="val_loss", head="fc")
    trainer = quiet_trainer(rounds, *callbacks, **options)
    trainer.fit(federation, datamodule=data)
    return federation, trainer, data


def test_csv(tmp_path):
    _, trainer, _ = fitted(2, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for name in (
        "train_loss",
        "val_loss",
        "val_loss/std",
        "val_accuracy/mean",
        "train/loss",
        "bytes/up_weights",
    ):
        assert [row["step"] for row in rows if row[name]] == ["0", "1"], name
    last = [row for row in rows if row["val_loss"]][-1]
    assert float(last["val_loss"]) == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_any_logger():
    logger = Recorder()
    _, trainer, data = fitted(2, logger=logger)
    steps = {name: [step for step, row in logger.rows if name in row] for name in ("train_loss", "val_loss")}
    assert steps == {"train_loss": [0, 1], "val_loss": [0, 1]}
    assert all(isinstance(value, float) for _, row in logger.rows for value in row.values())
    trainer.test(trainer.lightning_module, datamodule=data, verbose=False)
    assert "test_loss" in logger.rows[-1][1]
    assert logger.hyperparameters == []


@pytest.mark.filterwarnings("error:.*no logger configured")
def test_an_evaluation_without_a_logger_says_nothing_of_it():
    federation, trainer, data = fitted(1, logger=False)
    (found,) = trainer.validate(federation, datamodule=data, verbose=False)
    assert "val_loss" in found
    (found,) = trainer.test(federation, datamodule=data, verbose=False)
    assert "test_loss" in found


def test_hyperparameters_of_the_module_are_logged():
    class Saving(Net):
        def __init__(self, lr: float, width: int = 3, layer: str = "") -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    federation, data = federate(Saving(0.5, layer="flat"), Data(), FedPer, num_clients=2, head="fc", seed=1)
    logger = Recorder()
    quiet_trainer(1, logger=logger).fit(federation, datamodule=data)
    assert dict(logger.hyperparameters[0]) == {"method": "FedPer", "lr": 0.5, "width": 3, "layer": "flat"}


def test_callbacks_that_the_module_configures_see_rounds():
    class Stopping(Net):
        def configure_callbacks(self):
            return EarlyStopping("val_loss", patience=1, min_delta=100.0)

    federation, data = federate(Stopping(), Data(), FedPer, num_clients=2, head="fc", seed=1)
    trainer = quiet_trainer(5)
    trainer.fit(federation, datamodule=data)
    assert trainer.current_epoch == 2


def test_callbacks_of_the_project_go_on(tmp_path):
    """They watch what the module logs, under its own names."""
    best = ModelCheckpoint(tmp_path, monitor="val_loss", filename="best")
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    federation, trainer, data = fitted(5, best, stop, enable_checkpointing=True)
    assert trainer.current_epoch == 2
    assert float(best.best_model_score) == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=0.5)
    trainer.test(federation, datamodule=data, ckpt_path="best", **WEIGHTS_ONLY, verbose=False)


def test_a_run_says_nothing_of_logging_intervals(tmp_path, recwarn):
    run_project(FedPer, 2, trainer={"logger": CSVLogger(tmp_path)})
    assert not [w for w in recwarn if "logging interval" in str(w.message) or "configure_optimizers" in str(w.message)]
