"""The checkpoint of the best round removes no file but its own."""

from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from _helpers.toy import Toy, quiet_trainer, tiny_encoder
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import FederatedLoop, Federation
from pfl_lightning.methods import FedAvg
from pfl_lightning.state.best_round import BestRound

BEST = {"monitor": "val_accuracy/mean", "mode": "max", "auto_insert_metric_name": False}


def play(folder, rounds, *others, ckpt_path=None, **best):
    """Fit so many rounds, with a checkpoint of the best."""
    own = BestRound(**{**BEST, "dirpath": str(folder), "filename": "best-round-{round}", "save_last": True, **best})
    trainer = quiet_trainer(rounds, FederatedLoop(), own, *others, enable_checkpointing=True)
    federation = Federation(partial(FedAvg, lr=0.05), tiny_encoder, seed=1)
    trainer.fit(federation, datamodule=Toy(), ckpt_path=ckpt_path)


def kept(folder):
    """Every round, under a name that begins as that of the best one."""
    options = {"every_n_epochs": 1, "save_top_k": -1, "auto_insert_metric_name": False}
    return ModelCheckpoint(dirpath=str(folder), filename="best-round-kept-{epoch}", **options)


def other_best(folder):
    """The best round by the loss, in the same folder."""
    return BestRound(**{**BEST, "mode": "min"}, dirpath=str(folder), filename="best-round-{round}-loss")


@pytest.mark.parametrize("other", [kept, other_best])
def test_a_resume_leaves_the_files_of_other_callbacks(tmp_path, other):
    play(tmp_path, 2, other(tmp_path))
    before = {path.name for path in tmp_path.iterdir() if "kept" in path.name or "loss" in path.name}
    assert before
    play(tmp_path, 2, other(tmp_path), ckpt_path=str(tmp_path / "last.ckpt"))
    assert before <= {path.name for path in tmp_path.iterdir()}


class Watch(L.Callback):
    """Sees that the files which the checkpoint of the last round names are there, after every client."""

    def __init__(self, folder, die_in=None):
        self.folder, self.die_in, self.looks = folder, die_in, 0

    def look(self, trainer, *_):
        path = self.folder / "last.ckpt"
        if path.is_file():
            states = torch.load(path, weights_only=True)["callbacks"]
            names = [name for key, state in states.items() if "BestRound" in key for name in state["best_k_models"]]
            assert names
            assert all((self.folder / Path(name).name).is_file() for name in names), names
            self.looks += 1

    on_train_batch_start = on_train_batch_end = on_validation_start = on_train_epoch_start = look

    def on_validation_end(self, trainer, pl_module):
        self.look(trainer)
        if trainer.current_epoch == self.die_in:
            raise RuntimeError("killed")


def test_what_the_checkpoint_of_the_last_round_names_is_there(tmp_path):
    """Every round is the best one here."""
    best, watch = {"monitor": "round"}, Watch(tmp_path, die_in=2)
    with pytest.raises(RuntimeError, match="killed"):
        play(tmp_path, 4, watch, **best)
    assert watch.looks > 5
    again = Watch(tmp_path)
    play(tmp_path, 4, again, ckpt_path=str(tmp_path / "last.ckpt"), **best)
    assert again.looks > 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-round-4.ckpt", "last.ckpt"]
