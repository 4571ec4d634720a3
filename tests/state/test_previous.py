"""The checkpoint before the last one is there as long as nobody has trained from the server of the last one."""

import os
import warnings
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.toy import CLIENTS, FEATURES, GivenCohorts, assert_same, run, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from pfl_lightning.errors import FederationError
from pfl_lightning.methods import FedAvg, FedPAC, LocalOnly
from pfl_lightning.state.best_round import LastRound
from pfl_lightning.state.checkpoints import AtomicCheckpointIO

BAD = 2


class Watch(L.Callback):
    """Notes which checkpoints there are: at the end of every round, and after every client."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def look(self, *_):
        self.seen.append(sorted(path.name for path in self.folder.glob("*")))

    on_train_epoch_start = on_train_batch_end = look


def keeper(kind, folder):
    if kind is LastRound:
        return LastRound(folder, "last", enable_version_counter=False, save_on_train_epoch_end=True)
    return ModelCheckpoint(folder, save_last=True, every_n_epochs=1)


def play(method, rounds, folder, kind=LastRound, ratio=None, callbacks=(), **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = GivenCohorts(range(CLIENTS), max_update_ratio=ratio)
        keep = [keeper(kind, folder), *callbacks]
        return run(
            method,
            rounds,
            loop=loop,
            callbacks=keep,
            enable_checkpointing=True,
            encoder=rectified_encoder,
            limit_val_batches=0,
            **options,
        )


def rectified_encoder(shape):
    """Whose features grow with the weights."""
    encoder = nn.Sequential(nn.Linear(shape[0], 5), nn.ReLU(), nn.Linear(5, FEATURES), nn.ReLU())
    encoder.out_features = FEATURES
    return encoder


def poisoned(method, value=1e11, round=1):
    """The method, of which client 2 sends absurd numbers in one round."""

    class Poisoned(method):
        def make_update(self, context, before):
            update = super().make_update(context, before)
            if (context.client, context.round) != (BAD, round):
                return update
            return update.with_tensors(lambda t: t + value if t.is_floating_point() else t)

    return partial(Poisoned, epochs=1)


def rounds_of(path):
    return torch.load(path, weights_only=False)["epoch"] + 1


@pytest.mark.parametrize("kind", [LastRound, ModelCheckpoint])
@pytest.mark.parametrize(("method", "value"), [(FedAvg, 1e11), (FedPAC, 1e11)])
def test_where_no_client_can_train_the_one_before_is_named_and_resumed_from(kind, method, value, tmp_path):
    last, previous = tmp_path / "last.ckpt", tmp_path / "last-previous.ckpt"
    with pytest.raises(FederationError) as caught:
        play(poisoned(method, value), 9, tmp_path, kind)
    [note] = [note for note in caught.value.__notes__ if "previous" in note]
    assert f"trained from the server in {last}" in note
    assert note.endswith(f"resume with --ckpt_path {previous}")
    assert rounds_of(previous) == 1
    with pytest.raises(FederationError) as again:  # nothing is lost by another try
        play(poisoned(method, value), 9, tmp_path, kind, ckpt_path=str(last))
    assert note in again.value.__notes__
    assert rounds_of(previous) == 1
    resumed = play(poisoned(method, value), 3, tmp_path, kind, ratio=1000.0, ckpt_path=str(previous))
    whole = play(poisoned(method, value), 3, tmp_path / "other", kind, ratio=1000.0)
    assert_same(whole_state(resumed), whole_state(whole))
    assert (rounds_of(last), previous.exists()) == (3, False)


def test_a_kill_after_a_resume_from_it_loses_nothing(tmp_path):
    """Until the spoiled file is overwritten, the one before it stays."""
    previous, watch = tmp_path / "last-previous.ckpt", Watch(tmp_path)
    with pytest.raises(FederationError):
        play(poisoned(FedAvg), 9, tmp_path)
    play(poisoned(FedAvg), 3, tmp_path, ratio=1000.0, callbacks=[watch], ckpt_path=str(previous))
    first = watch.seen[: 1 + CLIENTS]
    assert first == [["last-previous.ckpt", "last.ckpt"]] * (1 + CLIENTS)


@pytest.mark.parametrize("method", [FedAvg, LocalOnly])
def test_in_a_sound_run_it_is_there_from_the_end_of_a_round_to_that_of_the_next(method, tmp_path):
    watch, both = Watch(tmp_path), ["last-previous.ckpt", "last.ckpt"]
    play(partial(method, epochs=1), 4, tmp_path, callbacks=[watch])
    during = [watch.seen[place : place + 1 + CLIENTS] for place in range(0, len(watch.seen), 1 + CLIENTS)]
    assert [set(map(tuple, seen[:-1])) for seen in during] == [{()}, {("last.ckpt",)}, {tuple(both)}, {tuple(both)}]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_run_that_is_killed_after_its_last_round_keeps_nothing_more_once_it_is_resumed(tmp_path):
    class Killed(L.Callback):
        def on_train_end(self, trainer, pl_module):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        play(partial(FedAvg, epochs=1), 3, tmp_path, callbacks=[Killed()])
    assert (tmp_path / "last-previous.ckpt").exists()
    play(partial(FedAvg, epochs=1), 3, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_finished_run_keeps_it_where_the_last_round_has_changed_the_server_beyond_measure(tmp_path):
    play(poisoned(FedAvg), 2, tmp_path)
    assert rounds_of(tmp_path / "last-previous.ckpt") == 1
    with pytest.raises(FederationError) as caught:
        play(poisoned(FedAvg), 9, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert any("last-previous.ckpt" in note for note in caught.value.__notes__)


def test_other_checkpoints_and_other_errors_have_none(tmp_path):
    class Ends(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.current_epoch == 2:
                raise FederationError("something else")

    with pytest.raises(FederationError, match="something else") as caught:
        play(partial(FedAvg, epochs=1), 4, tmp_path, callbacks=[Ends()])
    assert (tmp_path / "last-previous.ckpt").is_file()
    assert not [note for note in getattr(caught.value, "__notes__", ()) if "previous" in note]
    (tmp_path / "mine.ckpt").write_text("1")
    AtomicCheckpointIO().save_checkpoint(content(1), tmp_path / "mine.ckpt")
    assert not (tmp_path / "mine-previous.ckpt").exists()


def content(rounds, undone=0):
    """A checkpoint of so many rounds, of which the last ones were undone."""
    loop = {"rounds": rounds, "undone": undone}
    return {"state_dict": {}, "pytorch-lightning_version": "2.6", "callbacks": {"Loop": loop}}


def kept(path):
    return torch.load(path, weights_only=True)["callbacks"]["Loop"]["rounds"]


def test_without_hard_links_it_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("not here")))
    path, previous, writer = tmp_path / "last.ckpt", tmp_path / "last-previous.ckpt", AtomicCheckpointIO()
    for rounds, undone, expected in [(1, 0, None), (1, 0, None), (2, 0, 1), (3, 1, 1), (4, 2, 1), (5, 0, 4), (5, 0, 4)]:
        writer.save_checkpoint(content(rounds, undone), path)
        assert (kept(previous) if previous.exists() else None) == expected
    assert writer.previous() == [(path, previous)]
