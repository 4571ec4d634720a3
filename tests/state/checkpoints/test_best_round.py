"""The checkpoint of the best round removes no file but its own."""

from functools import partial

import pytest
from _helpers.toy import Toy, quiet_trainer, tiny_encoder
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import FederatedLoop, Federation
from pfl_lightning.methods import FedAvg
from pfl_lightning.state.checkpoints.best_round import BestRound

BEST = {"monitor": "accuracy/mean", "mode": "max", "auto_insert_metric_name": False}


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


@pytest.mark.parametrize("named", [False, True])
def test_a_resume_removes_what_a_kill_left_and_nothing_else(tmp_path, named):
    play(tmp_path, 2, auto_insert_metric_name=named)
    left, mine = tmp_path / f"best-round-{'round=' * named}99.ckpt", tmp_path / "best-round-of-mine.ckpt"
    for path in (left, mine):
        path.touch()
    play(tmp_path, 2, ckpt_path=str(tmp_path / "last.ckpt"), auto_insert_metric_name=named)
    assert (left.exists(), mine.exists()) == (False, True)
