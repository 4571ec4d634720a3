"""Loggers get the hyper-parameters of a project as in a plain run, and the name of the method."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pfl_lightning import FederatedLoop
from pfl_lightning.methods import FedAvg


class Nested(Net):
    def __init__(self, optimizer: dict[str, Any], layers: list[int], name: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters()


class Counted(Data):
    def __init__(self, classes: list[int], method: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(*(["classes"] if method is None else []))


def written(folder: Path, module: Any, data: Any, *callbacks: Any) -> Any:
    logger = CSVLogger(folder)
    trainer = quiet_trainer(1, *callbacks, logger=logger, enable_checkpointing=bool(callbacks))
    trainer.fit(module, data)
    return yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())


def loop() -> FederatedLoop:
    return FederatedLoop(method=FedAvg, num_clients=2, seed=0)


@pytest.mark.parametrize("has_own", [True, False])
def test_what_is_logged_is_that_of_a_plain_run(tmp_path, has_own):
    module = (lambda: Nested({"lr": [0.1, {"warm": 3}]}, [3, 4])) if has_own else Net
    plain = written(tmp_path / "plain", module(), Counted([1, 2]))
    found = written(tmp_path / "federated", module(), Counted([1, 2]), loop())
    assert found == ({"method": "FedAvg", **plain} if has_own else plain)
    assert found["classes"] == [1, 2]


def test_names_that_both_have_are_the_data_module_s(tmp_path):
    assert written(tmp_path, Nested({}, []), Counted([1], method="mine"), loop())["method"] == "mine"


def test_the_data_module_s_are_not_in_the_module_s_part_of_checkpoints(tmp_path):
    saved = ModelCheckpoint(tmp_path)
    written(tmp_path, Nested({"lr": 1}, [3]), Counted([1]), loop(), saved)
    found = torch.load(saved.best_model_path, weights_only=True)
    assert found["hyper_parameters"] == {"optimizer": {"lr": 1}, "layers": [3], "name": "a"}
    assert Nested.load_from_checkpoint(saved.best_model_path).hparams.layers == [3]


def test_numbers_of_numpy_are_in_checkpoints_and_logs(tmp_path):
    saved = ModelCheckpoint(tmp_path)
    given = {"lr": np.float64(0.1), "steps": (np.int32(3), [np.float32(0.5)]), "on": np.bool_(True)}
    logged = written(tmp_path, Nested(given, [np.int64(3)]), Counted([1]), loop(), saved)
    wanted = {"lr": 0.1, "steps": (3, [0.5]), "on": True}
    found = torch.load(saved.best_model_path, weights_only=True)["hyper_parameters"]
    assert found == {"optimizer": wanted, "layers": [3], "name": "a"}
    assert type(found["optimizer"]["lr"]) is float  # NumPy's float64 is a float, too
    assert Nested.load_from_checkpoint(saved.best_model_path).hparams.optimizer == wanted
    assert logged["layers"] == [3]
