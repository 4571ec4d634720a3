"""What a module sends to its loggers itself, inside local fits and evaluations."""

import os
import pickle
from typing import Any

import torch
from _helpers.events import board, events, rounds
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger

from pfl_lightning import federate
from pfl_lightning.drop_in.fits.loggers import OuterRun
from pfl_lightning.methods import FedAvg


class Drawing(Net):
    """Sends pictures, text and numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.logger.experiment.add_image("batch", torch.rand(1, 8, 8), self.global_step)
            self.logger.experiment.add_text("words", "a few", global_step=self.global_step)
            self.logger.log_metrics({"own": 1.0}, step=self.global_step)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        assert isinstance(self.logger, TensorBoardLogger)
        self.logger.experiment.add_histogram("scores", self(batch[0]), self.current_epoch)

    def on_train_start(self) -> None:
        self.logger.log_hyperparams({"lr": self.lr})
        self.logger.experiment.add_graph(self, torch.zeros(1, 6))


def fitted(module: Any, rounds: int = 2, clients: int = 1, **options: Any) -> Any:
    federation, data = federate(module, Data(), FedAvg, num_clients=3, seed=1, head="fc")
    federation.local.outer.clients = clients
    trainer = quiet_trainer(rounds, **options)
    trainer.fit(federation, datamodule=data)
    return federation, trainer, data


def test_pictures_and_texts_of_one_client_a_round_arrive(tmp_path):
    fitted(Drawing(), logger=board(tmp_path))
    found = events(tmp_path)
    tags = {tag for kind, own in found.Tags().items() if isinstance(own, list) for tag in own}
    assert rounds(found, "client_0/batch") == [0, 1]
    assert sorted(set(rounds(found, "client_0/words/text_summary"))) == [0, 1]
    assert set(rounds(found, "client_0/scores")) == {0, 1}
    assert {tag for tag in tags if tag.startswith("client_")} == {
        "client_0/batch",
        "client_0/words/text_summary",
        "client_0/scores",
        "client_0/own",
    }
    assert "train_loss" in tags
    assert found.Tags()["graph"] is False


def test_more_clients_may_be_chosen(tmp_path):
    fitted(Drawing(), rounds=1, clients=2, logger=board(tmp_path))
    images = events(tmp_path).Tags()["images"]
    assert images == ["client_0/batch", "client_1/batch"]


class Folders(Net):
    """Writes into the run's folder."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).seen.append((self.trainer.log_dir, self.logger.log_dir if self.logger else None, len(self.loggers)))
        return super().training_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        type(self).seen.append((self.trainer.log_dir, self.logger.log_dir if self.logger else None, len(self.loggers)))


def test_folders_are_those_of_the_run(tmp_path):
    Folders.seen = []
    logger = CSVLogger(tmp_path)
    fitted(Folders(), rounds=1, logger=logger)
    assert set(Folders.seen) == {(logger.log_dir, logger.log_dir, 1)}
    Folders.seen = []
    fitted(Folders(), rounds=1, logger=[TensorBoardLogger(tmp_path), logger])
    assert len(set(Folders.seen)) == 1
    assert Folders.seen[0][2] == 2


def test_without_a_logger_there_is_none_inside(tmp_path):
    Folders.seen = []
    fitted(Folders(), rounds=1, default_root_dir=tmp_path)
    assert set(Folders.seen) == {(os.fspath(tmp_path), None, 0)}


class Panels(Logger):
    """With a function of W&B's logger."""

    name, version, experiment = "panels", 0, None

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_image(self, key: str, images: list[Any]) -> None:
        raise AssertionError("a client's images")

    def watch(self, model: Any) -> None:
        raise AssertionError("a client's model")

    def fetch(self, name: str) -> str:
        return name


def test_functions_of_other_loggers_write_nothing_and_say_so(caplog):
    class Sending(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.watch(self)
            self.logger.log_image("views", [batch[0]])
            assert self.logger.fetch("data:latest") == "data:latest"
            return super().training_step(batch, batch_idx)

    with caplog.at_level("WARNING", "pfl_lightning"):
        fitted(Sending(), logger=Panels())
    [said] = [record.getMessage() for record in caplog.records if "writes nothing" in record.getMessage()]
    assert said.startswith("Panels.log_image writes nothing inside local fits and evaluations: use self.logger.log_met")


def test_in_another_process_there_are_no_loggers():
    run = OuterRun()
    run.trainer = quiet_trainer(1)
    other = pickle.loads(pickle.dumps(run))
    [logger] = other.options(Net(), [], {})["logger"]
    assert isinstance(logger, DummyLogger)
    logger.experiment.add_image("dropped", None)
    logger.log_metrics({"dropped": 1.0})
    assert not other.arrives
    assert not other.callbacks()
