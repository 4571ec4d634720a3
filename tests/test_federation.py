"""A federation is an ordinary Lightning fit."""

import copy
import csv
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.methods import EVERY_METHOD
from _helpers.toy import CLIENTS, GivenCohorts, Toy, assert_same, for_toy, quiet_trainer, run, tiny_encoder, whole_state
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.progress import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.methods import Ditto, FedAvg, FedBABU, FedPAC, FedRep, LocalOnly

FIT = partial(FedAvg, lr=0.05, epochs=1)


class Diary(L.Callback):
    """What happened, in order."""

    def __init__(self):
        self.events = []
        self.bars = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.events.append(("fit", trainer.current_epoch, batch.tolist()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.bars.append(dict(trainer.progress_bar_metrics))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self.events.append(("validate", trainer.current_epoch, batch.tolist()))

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append(("end", trainer.current_epoch, trainer.global_step))


def test_an_epoch_is_a_round_and_a_batch_is_a_client():
    diary = Diary()
    run(FIT, 2, cohorts=[[1, 3], [0, 2, 4]], callbacks=[diary], num_sanity_val_steps=2)
    everybody = [("validate", 0, [client]) for client in range(CLIENTS)]
    assert diary.events == [
        *[("fit", 0, [1]), ("fit", 0, [3]), *everybody, ("end", 0, 1)],
        *[("fit", 1, [0]), ("fit", 1, [2]), ("fit", 1, [4])],
        *[(kind, 1, client) for kind, _, client in everybody],
        ("end", 1, 2),
    ]


def test_the_progress_bar_shows_round_client_and_loss():
    diary = Diary()
    run(FIT, 2, cohorts=[[1, 3]], callbacks=[diary])
    assert [(bar["round"], bar["client"]) for bar in diary.bars] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(bar["loss"] > 0 for bar in diary.bars)
    assert len({bar["loss"] for bar in diary.bars}) == 4
    assert {"val_accuracy", "test_accuracy"} <= diary.bars[-1].keys()


def test_an_ordinary_progress_bar_runs(capsys):
    run(FIT, 1, enable_progress_bar=True, callbacks=[TQDMProgressBar(refresh_rate=1)])
    assert "client=4" in "".join(capsys.readouterr())


# ---------------------------------------------------------------------- callbacks and loggers of Lightning


def test_model_checkpoint_keeps_the_round_with_the_best_accuracy(tmp_path):
    saver = ModelCheckpoint(tmp_path, monitor="val_accuracy/mean", mode="max", save_top_k=1, filename="{epoch}")
    writer = ResultsWriter(str(tmp_path))
    data = Toy()
    run(partial(FedPAC, epochs=1, lr=0.2), 5, data=data, callbacks=[saver, writer], enable_checkpointing=True)
    accuracies = [row.validation for row in writer.history]
    assert len(set(accuracies)) > 1
    best = max(range(5), key=lambda k: accuracies[k])
    assert saver.best_model_path == str(tmp_path / f"epoch={best}.ckpt")
    assert float(saver.best_model_score) == pytest.approx(accuracies[best], abs=1e-6)


def test_early_stopping_ends_the_rounds():
    stopper = EarlyStopping("val_accuracy/mean", mode="max", patience=2, min_delta=2.0)  # nothing ever improves by that
    federation = run(FIT, 20, callbacks=[stopper])
    assert federation.trainer.current_epoch == 3
    assert federation.trainer.should_stop


def test_csv_rows_carry_the_round_as_step(tmp_path):
    logger = CSVLogger(tmp_path, name="log", version=0)
    run(FIT, 3, logger=logger, cohorts=[[0], [1, 2], [3]])
    with (tmp_path / "log" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in (
        "val_accuracy/mean",
        "val_accuracy/worst_decile",
        "val_loss/mean",
        "test_accuracy/mean",
        "test_loss/mean",
    ):
        assert [row["step"] for row in rows if row[name]] == ["0", "1", "2"], name
    for name in ("train/loss", "train/clients_left_out", "bytes/up_weights", "bytes/down_weights"):
        assert [row["step"] for row in rows if row[name]] == ["0", "1", "2"], name
    up = [float(row["bytes/up_weights"]) for row in rows if row["bytes/up_weights"]]
    assert up == [up[0], 3 * up[0], 4 * up[0]]


# The configs of the digits run every method so.
@EVERY_METHOD
@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_fast_dev_run(tmp_path, method, engine):
    callbacks = [ResultsWriter(str(tmp_path / "results")), ModelCheckpoint(tmp_path / "checkpoints")]
    diary = Diary()
    federation = run(
        for_toy(method),
        7,
        callbacks=[*callbacks, diary],
        fast_dev_run=True,
        enable_checkpointing=True,
        engine=engine(),
    )
    assert diary.events == [("fit", 0, [0]), ("validate", 0, [0]), ("end", 0, 1)]
    assert federation.trainer.state.finished
    assert not list(tmp_path.iterdir())


def test_limits():
    diary = Diary()
    federation = run(FIT, 1, callbacks=[diary], limit_train_batches=2, limit_val_batches=3)
    assert diary.events[:2] == [("fit", 0, [0]), ("fit", 0, [1])]
    assert [event[2] for event in diary.events if event[0] == "validate"] == [[0], [1], [2]]
    assert sorted(federation.validation_scores) == [0, 1, 2]
    two = run(FIT, 1, cohorts=[[0, 1]])
    assert_same(whole_state(federation), whole_state(two))


def test_validation_every_other_round():
    diary = Diary()
    run(FIT, 4, callbacks=[diary], check_val_every_n_epoch=2)
    assert {event[1] for event in diary.events if event[0] == "validate"} == {1, 3}


# ---------------------------------------------------------------------- validate and test


@pytest.mark.parametrize("method", [FedPAC, LocalOnly, partial(FedAvg, fine_tune="head")])
def test_validate_and_test_by_themselves(tmp_path, method):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trained = run(partial(method, epochs=1), 1, callbacks=[saver], enable_checkpointing=True)
    validation, test = dict(trained.validation_scores), dict(trained.test_scores)
    fresh, trainer, data = Federation(partial(method, epochs=1), tiny_encoder, seed=11), quiet_trainer(1), Toy()
    path = str(tmp_path / "epoch=0.ckpt")
    [found] = trainer.validate(fresh, datamodule=data, ckpt_path=path, verbose=False)
    assert fresh.validation_scores == validation
    assert fresh.test_scores == {}
    mean = sum(score.accuracy for score in validation.values()) / CLIENTS
    assert found["val_accuracy/mean"] == pytest.approx(mean, abs=1e-6)
    [found] = trainer.test(fresh, datamodule=data, ckpt_path=path, verbose=False)
    assert fresh.test_scores == test
    assert found["test_accuracy/mean"] == pytest.approx(sum(s.accuracy for s in test.values()) / CLIENTS, abs=1e-6)


@pytest.mark.parametrize("method", [FedPAC, FedRep, FedBABU, LocalOnly])
def test_a_clients_own_model_is_at_hand_after_the_fit(method):
    federation = run(partial(method, epochs=1, lr=0.1), 2)
    scores = {client: federation.client_model(client)(torch.ones(3, 6)).detach().clone() for client in (0, 1, 0)}
    assert not federation.client_model(0).training
    torch.testing.assert_close(federation.client_model(0)(torch.ones(3, 6)).detach(), scores[0], rtol=0, atol=0)
    if method is not FedBABU:
        assert not torch.equal(scores[0], scores[1])
    with pytest.raises(IndexError, match="clients are 0 to 4"):
        federation.client_model(5)


def test_two_fits_in_a_row_go_on():
    """A second Trainer takes up the federation as it stands."""
    federation = run(FIT, 1)
    before = whole_state(federation)
    quiet_trainer(1, GivenCohorts(range(CLIENTS))).fit(federation, datamodule=Toy())
    assert not torch.equal(whole_state(federation)["client 0 head.weight"], before["client 0 head.weight"])


# ---------------------------------------------------------------------- the loop


def loops(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, RoundLoop)]


def test_a_trainer_without_a_loop_gets_one():
    trainer, federation = quiet_trainer(2), Federation(FIT, tiny_encoder, seed=11)
    trainer.fit(federation, datamodule=Toy())
    [loop] = loops(trainer)
    assert (loop.cohort, loop.rounds) == (1.0, 2)
    assert_same(whole_state(federation), whole_state(run(FIT, 2, loop=FederatedLoop())))
    trainer.test(federation, datamodule=Toy(), verbose=False)
    assert loops(trainer) == [loop]


def test_the_loop_of_the_trainer_stays():
    loop = GivenCohorts([1, 3])
    federation = run(FIT, 1, loop=loop)
    assert loops(federation.trainer) == [loop]
    assert [result.client for result in loop.results] == [1, 3]


# ---------------------------------------------------------------------- what is missing or wrong


class NoLoop(Federation):
    """Leaves out the loop that drives the rounds."""

    def configure_callbacks(self):
        return []


def test_without_the_loop():
    with pytest.raises(FederationError, match=r"no round has begun: no RoundLoop \(FederatedLoop\) is"):
        quiet_trainer(1).fit(NoLoop(FIT, tiny_encoder), datamodule=Toy())


@pytest.mark.parametrize("loop", [[FederatedLoop()], []])
def test_without_a_data_module(loop):
    with pytest.raises(ConfigurationError, match=r"needs a FederatedDataModule.*got NoneType"):
        quiet_trainer(1, *loop).fit(Federation(FIT, tiny_encoder))


def test_with_an_ordinary_data_module():
    with pytest.raises(ConfigurationError, match=r"needs a FederatedDataModule.*got LightningDataModule"):
        quiet_trainer(1).fit(Federation(FIT, tiny_encoder), datamodule=L.LightningDataModule())


def test_the_loop_with_another_module():
    from lightning.pytorch.demos.boring_classes import BoringModel

    with pytest.raises(ConfigurationError, match="drives a Federation, got BoringModel"):
        quiet_trainer(1, FederatedLoop()).fit(BoringModel())


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    with pytest.raises(ConfigurationError, match=r"one process; the Trainer has 2\. Use devices=1"):
        run(FIT)


def test_other_data_than_before():
    federation = run(FIT)
    with pytest.raises(ConfigurationError, match="has 5 clients, the data have 3"):
        quiet_trainer(1, FederatedLoop()).fit(federation, datamodule=Toy(Toy().labels[:3]))


def test_encoders():
    with pytest.raises(ConfigurationError, match="Sequential has no integer attribute out_features"):
        run(FIT, encoder=lambda shape: torch.nn.Sequential(torch.nn.Linear(6, 4)))
    with pytest.raises(ValueError, match=r"unknown encoder 'mpl'; did you mean 'mlp'\?"):
        run(FIT, encoder="mpl")
    assert run(FIT, encoder="mlp").models[0].encoder.out_features == 64


def test_a_pattern_that_fits_nothing():
    with pytest.raises(
        ConfigurationError, match=r"'body\.\*' matches no parameter or buffer; there are \['encoder.0.weight'"
    ):
        run(type("Bad", (FedAvg,), {"shared": ("body.*",)}))


# ---------------------------------------------------------------------- precision


@pytest.mark.repeated
@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("method", [FedRep, FedPAC, FedBABU], ids=lambda method: method.__name__)
def test_other_precisions(tmp_path, method, engine, precision, dtype):
    """Weights of every client and of the server are kept in the precision that was asked for, on disk too."""
    fit, saver = partial(method, lr=0.05, epochs=1), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options = {"precision": precision, "engine": engine()}
    federation = run(fit, 2, callbacks=[saver], enable_checkpointing=True, **options)
    state = whole_state(federation)
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {dtype}
    weight = state["client 0 encoder.0.weight"]
    assert dtype == torch.bfloat16 or not torch.equal(weight, weight.float().double())
    assert len(federation.test_scores) == CLIENTS
    resumed = run(fit, 2, ckpt_path=str(tmp_path / "epoch=0.ckpt"), **options)
    assert_same(whole_state(resumed), state)


def test_a_finished_fit_leaves_no_engine_suspended():
    """The loop and the federation can be copied, and the clients of the engine's last group are released."""
    loop = FederatedLoop()
    federation = run(FedAvg, 1, loop=loop, engine=VectorizedEngine(forward="vmap"))
    copy.deepcopy(loop)
    assert list(federation.trainer.callbacks[0]._round.fits) == []


def test_a_fit_without_a_loop_gets_one_and_an_evaluation_needs_none():
    federation, data = Federation(partial(FedAvg, epochs=1), tiny_encoder), Toy()
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    assert [type(callback).__name__ for callback in trainer.callbacks].count("RoundLoop") == 1
    assert federation.round == 0
    other = quiet_trainer(1)
    other.test(federation, datamodule=data, verbose=False)
    assert not any(isinstance(callback, RoundLoop) for callback in other.callbacks)


@pytest.mark.parametrize("method", [Ditto, FedPAC])
def test_an_exported_model_trains_on_its_own_loss_alone(method):
    model = run(partial(method, epochs=1), 1).client_model(0)
    inputs, labels = Toy().tensors(0)
    assert set(model.training_step((inputs, labels), 0)) == {"loss", "cross_entropy"}


@pytest.mark.parametrize("former", ["accuracy/mean", "novel_loss/mean", "accuracy/worst_decile"])
def test_a_callback_that_watches_a_former_name_is_told_the_new_one(former):
    new = former.replace("accuracy", "val_accuracy").replace("loss", "val_loss")
    with pytest.raises(ConfigurationError, match=f"EarlyStopping watches '{former}', .* monitor='{new}'"):
        run(FIT, 1, callbacks=[EarlyStopping(former)])
