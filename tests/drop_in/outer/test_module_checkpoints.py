"""Checkpoints of a project's federation are checkpoints of its module, which ``load_from_checkpoint`` takes."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import FederatedLoop, federate
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.state.checkpoints import FEDERATION, AtomicCheckpointIO


class Shaped(Net):
    """Has hyper-parameters that are no numbers, and something beside its weights in its checkpoints."""

    def __init__(self, method: str, shape: tuple[int, int] = (1, 1), extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = "none"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.words = checkpoint["words"]


class Configured(Net):
    """Has all hyper-parameters in one argument."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.config = config


def fitted(module: Any, folder: Any, method: Any = FedAvg, rounds: int = 1, **options: Any) -> tuple[Any, str]:
    loop = FederatedLoop(method=method, num_clients=2, seed=1, head="fc")
    saved = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=options.pop("weights_only", False))
    trainer = quiet_trainer(rounds, loop, saved, enable_checkpointing=True, **options)
    trainer.fit(module, datamodule=Data())
    return loop.federation, saved.best_model_path


@pytest.mark.parametrize("weights_only", [False, True])
def test_load_from_checkpoint_gives_the_global_model(weights_only, tmp_path):
    federation, path = fitted(Shaped("mine", (2, 3), extra=print), tmp_path, FedPer, weights_only=weights_only)
    found = Shaped.load_from_checkpoint(path, weights_only=True)
    assert dict(found.hparams) == {"method": "mine", "shape": (2, 3), "extra": None}
    assert found.words == "kept"
    for name, value in federation.global_model().state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_hyperparameters_in_one_argument_are_found(tmp_path):
    _, path = fitted(Configured({"rate": 0.1, "sizes": [1, 2]}), tmp_path)
    assert dict(Configured.load_from_checkpoint(path).config) == {"rate": 0.1, "sizes": [1, 2]}


@pytest.mark.parametrize("plugins", [[], [AtomicCheckpointIO()]], ids=["Lightning's reader", "the package's"])
def test_a_plain_trainer_takes_the_file(plugins, tmp_path):
    federation, path = fitted(Net(), tmp_path)
    plain = Net()
    quiet_trainer(1, plugins=plugins).test(plain, datamodule=Data(), ckpt_path=path, verbose=False)
    assert torch.equal(plain.fc.weight, federation.global_model().fc.weight)


class Other(TorchCheckpointIO):
    """A user's own reader and writer."""


def test_a_run_goes_on_from_a_file_that_another_writer_has_written(tmp_path):
    def run(rounds: int, folder: str, path: Any = None) -> Any:
        L.seed_everything(1, verbose=False)
        federation, data = federate(Net(), Data(), FedPer, num_clients=2, seed=1, head="fc")
        trainer = quiet_trainer(rounds, plugins=[Other()])
        trainer.fit(federation, datamodule=data, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / folder)
        return federation.client_model(1).fc.weight

    whole = run(2, "whole.ckpt")
    run(1, "first.ckpt")
    assert FEDERATION in torch.load(tmp_path / "first.ckpt", weights_only=True)
    assert torch.equal(run(2, "second.ckpt", tmp_path / "first.ckpt"), whole)


class Slim(Net):
    """Leaves a part out of its checkpoints, and has another name for one that is in them."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"kept.{name}": value for name, value in state.items() if name.startswith("fc")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("fc.weight", "fc.bias"):
            state[name] = state.pop(f"kept.{name}")


@pytest.mark.filterwarnings("ignore:Found keys that are in the model")
def test_a_module_that_changes_the_state_in_its_checkpoints_finds_it_so(tmp_path):
    federation, path = fitted(Slim(), tmp_path)
    assert set(torch.load(path, weights_only=True)["state_dict"]) == {"kept.fc.weight", "kept.fc.bias"}
    found = Slim.load_from_checkpoint(path, strict=False, weights_only=True)
    assert torch.equal(found.fc.weight, federation.global_model().fc.weight)
    trainer = quiet_trainer(2, FederatedLoop(method=FedAvg, num_clients=2, seed=1, head="fc"))
    trainer.fit(Slim(), datamodule=Data(), ckpt_path=path)  # all of it is there for the federation
    assert trainer.current_epoch == 2
