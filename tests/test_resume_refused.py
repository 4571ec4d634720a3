"""Checkpoints that a run does not resume from: of something else, or from the middle of a round."""

from functools import partial

import lightning as L
import pytest
import torch
from _helpers.resume import play
from _helpers.toy import LABELS, Toy, dropout_encoder, normed_encoder, run, tiny_encoder
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import MOON, FedAvg, FedEM, FedGH, FedPAC, FedPer, FedProto


def with_clients(number):
    return Toy(LABELS[:number])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (FedPer, {}, "another method, FedPAC; this run has FedPer"),
        (FedPAC, {"data": with_clients(4)}, "another number of clients, 5; this run has 4"),
        (FedPAC, {"encoder": normed_encoder, "data": Toy(batch_size=9)}, "another encoder"),
        (FedPAC, {"encoder": dropout_encoder}, "another encoder"),
        (partial(FedPAC, combination=False), {}, "personal state"),
    ],
    ids=["method", "clients", "encoder", "smaller encoder", "ablation"],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, method, options, message):
    play(tmp_path, 1, partial(FedPAC, epochs=1))
    with pytest.raises(CheckpointError, match=message):
        play(tmp_path, 2, method, ckpt_path=str(tmp_path / "last.ckpt"), **options)


@pytest.mark.parametrize(
    ("method", "options"), [(FedEM, {"components": 2}), (MOON, {"projection": 7})], ids=["components", "projection"]
)
def test_a_checkpoint_of_other_options_is_refused(tmp_path, method, options):
    play(tmp_path, 1, partial(method, epochs=1))
    with pytest.raises(CheckpointError, match="another encoder, or of other options of the method: the shape of "):
        play(tmp_path, 2, partial(method, epochs=1, **options), ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_checkpoint_of_a_larger_encoder_is_refused(tmp_path):
    def deeper(shape):
        encoder = tiny_encoder(shape)
        encoder.append(torch.nn.Linear(4, 4))
        return encoder

    play(tmp_path, 1, partial(FedAvg, epochs=1), encoder=deeper)
    with pytest.raises(CheckpointError, match="encoder"):
        play(tmp_path, 2, partial(FedAvg, epochs=1), ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    play(tmp_path, 1, partial(FedAvg, epochs=1))
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del content["state_dict"]["_extra_state"]["rounds_trained"]
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"earlier version of pfl_lightning: pfl-lightning==0\.3\.0 reads it"):
        play(tmp_path, 2, partial(FedAvg, epochs=1), ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_checkpoint_of_an_ordinary_module_is_refused(tmp_path):
    play(tmp_path, 1, partial(FedAvg, epochs=1))
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    content["state_dict"] = {"weight": torch.zeros(2)}
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="not of a Federation"):
        play(tmp_path, 2, partial(FedAvg, epochs=1), ckpt_path=str(tmp_path / "other.ckpt"))


class _SaveInRound(L.Callback):
    """Saves after one client of a round."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("method", [FedPAC, FedProto, FedGH], ids=lambda method: method.__name__)
def test_a_checkpoint_from_the_middle_of_a_round_is_refused(tmp_path, method):
    path = tmp_path / "middle.ckpt"
    method = partial(method, epochs=1)
    run(method, 2, loop=FederatedLoop(3), callbacks=[_SaveInRound(path, 1)])
    with pytest.raises(CheckpointError, match="middle of a round, after 1 rounds"):
        run(method, 3, loop=FederatedLoop(3), ckpt_path=str(path))


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_checkpoint_between_training_and_validation_is_refused(tmp_path, cohort):
    """Lightning would skip that validation and the start of the next round."""
    method = partial(FedPAC, lr=0.05, epochs=1)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(method, 3, loop=FederatedLoop(cohort), callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match="not all validated"):
        run(method, 4, loop=FederatedLoop(cohort), ckpt_path=str(tmp_path / "step=2.ckpt"))


class _SaveInValidation(L.Callback):
    """Saves after one client of the validation of a round."""

    def __init__(self, path):
        self.path = path

    def on_validation_batch_end(self, trainer, *_):
        if trainer.current_epoch == 1 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_from_the_middle_of_a_validation_is_refused(tmp_path):
    """Lightning would skip the rest of it and the start of the next round."""
    path = tmp_path / "middle.ckpt"
    run(partial(FedPAC, epochs=1), 2, loop=FederatedLoop(3), callbacks=[_SaveInValidation(path)])
    with pytest.raises(CheckpointError, match="not all validated"):
        run(partial(FedPAC, epochs=1), 3, loop=FederatedLoop(3), ckpt_path=str(path))


def test_fewer_rounds_than_the_checkpoint_has_are_refused(tmp_path):
    play(tmp_path, 3, partial(FedAvg, epochs=1))
    with pytest.raises(ConfigurationError, match=r"checkpoint is of round 3, and max_epochs, .* is 1: set it to more"):
        play(tmp_path, 1, partial(FedAvg, epochs=1), ckpt_path=str(tmp_path / "last.ckpt"))
    play(tmp_path, 3, partial(FedAvg, epochs=1), ckpt_path=str(tmp_path / "last.ckpt"))  # nothing is left to train
