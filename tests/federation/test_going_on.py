"""Fits that follow an early end, or an error in a round's validation."""

import warnings
from functools import partial
from typing import Any

import lightning as L
import pytest
from _helpers.results import valid
from _helpers.toy import GivenCohorts, Toy, assert_same, quiet_trainer, tiny_encoder, whole_state
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from pfl_lightning import FederatedLoop, Federation
from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.methods import FedAvg

COHORTS = [[0, 2, 3], [1, 2], [4], [0, 1, 3]]


def fit(folder: Any, *callbacks: L.Callback, rounds: int = 4, ckpt_path: Any = None, loop: Any = None) -> Any:
    federation = Federation(partial(FedAvg, lr=0.3, epochs=1), tiny_encoder, seed=1)
    saves = ModelCheckpoint(folder, "last", enable_version_counter=False, save_last=False)
    loop = loop or GivenCohorts(*COHORTS)
    options = {"logger": False, "enable_checkpointing": True}
    trainer = quiet_trainer(rounds, loop, ResultsWriter(str(folder)), *callbacks, saves, **options)
    trainer.fit(federation, datamodule=Toy(), ckpt_path=ckpt_path)
    return federation, trainer, loop


@pytest.mark.parametrize("patience", [1, 2])
def test_a_run_that_early_stopping_has_ended_stays_as_it_is(tmp_path, caplog, patience):
    def stopping() -> EarlyStopping:
        return EarlyStopping("val_accuracy/mean", mode="max", patience=patience, min_delta=1.0)

    first = fit(tmp_path, stopping())[0]
    written, clients = valid(tmp_path / "results.json"), (tmp_path / "clients.csv").read_text()
    assert written["rounds"] == 1 + patience
    again = fit(tmp_path, stopping(), ckpt_path=tmp_path / "last.ckpt")[0]
    assert f"EarlyStopping ended the checkpoint's run after round {1 + patience}, so no round follows" in caplog.text
    assert_same(whole_state(again), whole_state(first))
    now = valid(tmp_path / "results.json")
    assert (now["rounds"], now["finished"], now["history"]) == (1 + patience, True, written["history"])
    assert (tmp_path / "clients.csv").read_text() == clients
    further = fit(tmp_path, ckpt_path=tmp_path / "last.ckpt")[0]
    assert further.round == 3


def test_one_that_ended_after_its_first_round(tmp_path, caplog):
    stops = partial(EarlyStopping, "val_accuracy/mean", mode="max", stopping_threshold=0.0)
    fit(tmp_path, stops())
    again = fit(tmp_path, stops(), ckpt_path=tmp_path / "last.ckpt")[0]
    if hasattr(stops(), "stopping_reason"):  # Lightning 2.6
        assert again.round == 0
        assert "after round 1" in caplog.text


def test_one_that_has_diverged(tmp_path, caplog):
    class Diverges(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            loop._report(trainer, pl_module, "so it is said" if trainer.current_epoch == 1 else None)

    loop = FederatedLoop(stop_on_divergence=True)
    with pytest.warns(UserWarning, match="so it is said"):
        fit(tmp_path, Diverges(), loop=loop)
    again = fit(tmp_path, ckpt_path=tmp_path / "last.ckpt", loop=FederatedLoop(stop_on_divergence=True))[0]
    assert again.round == 1
    assert "FederatedLoop(stop_on_divergence=True) ended the checkpoint's run after round 2" in caplog.text
    assert fit(tmp_path, ckpt_path=tmp_path / "last.ckpt", loop=FederatedLoop())[0].round == 3


class Fails(L.Callback):
    """Ends the validation of a round by an error, once."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == self.round:
            self.round = -1
            raise RuntimeError("a plot failed")


@pytest.mark.parametrize("round", [0, 1, 3])
def test_a_round_whose_validation_has_failed_is_not_played_again(tmp_path, round):
    federation = Federation(partial(FedAvg, lr=0.3, epochs=1), tiny_encoder, seed=1)
    loop = GivenCohorts(*COHORTS)
    trainer = quiet_trainer(4, loop, ResultsWriter(str(tmp_path)), Fails(round))
    with pytest.raises(RuntimeError, match="a plot failed"):
        trainer.fit(federation, datamodule=Toy())
    found = valid(tmp_path / "results.json")
    assert [entry["round"] for entry in found["history"]] == list(range(1, round + 2))
    assert sum(entry["bytes_up"] for entry in found["history"]) == found["bytes"]["up"]
    trainer.fit(federation, datamodule=Toy())
    found = valid(tmp_path / "results.json")
    assert [(e["round"], e["clients"]) for e in found["history"]] == [(n + 1, 0 if n == round else 5) for n in range(4)]
    assert (found["rounds"], found["finished"]) == (4, True)
    assert_same(whole_state(federation), whole_state(fit(tmp_path / "whole")[0]))


def test_a_round_that_was_dropped_is_not_the_end(tmp_path):
    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    fit(tmp_path, Stops())
    found = valid(tmp_path / "results.json")
    assert (found["rounds"], found["finished"]) == (1, False)


def test_a_checkpoint_that_was_evaluated_is_not_what_a_fit_goes_on_from(tmp_path):
    fit(tmp_path, loop=FederatedLoop(eval_cohort=2), rounds=1)
    federation = Federation(partial(FedAvg, lr=0.3, epochs=1), tiny_encoder, seed=1)
    trainer = quiet_trainer(1, FederatedLoop())
    trainer.test(federation, datamodule=Toy(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*checkpoint's run evaluated")
        trainer.fit(federation, datamodule=Toy())
    assert federation.round == 0


def test_a_checkpoint_of_no_round_is_one_of_no_round(tmp_path):
    federation = Federation(partial(FedAvg, lr=0.3, epochs=1), tiny_encoder, seed=1)
    trainer = quiet_trainer(1, FederatedLoop(), ResultsWriter(str(tmp_path)))
    trainer.validate(federation, datamodule=Toy(), verbose=False)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    trainer.validate(federation, datamodule=Toy(), ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert not federation.has_trained
    assert valid(tmp_path / "validate.json")["accuracy"]["last"]["round"] == 0
