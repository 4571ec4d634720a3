"""A job that SLURM preempts and starts again goes on as if nothing had happened, with Lightning's own handlers."""

import json
from functools import partial

import pytest
import torch
from _helpers.resume import play
from _helpers.slurm import SignalAt, enter_job
from _helpers.toy import Toy, assert_same, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import TrainerEngine
from pfl_lightning.methods import FedPAC

METHOD = partial(FedPAC, lr=0.05, epochs=1)
MOMENTS = [
    ("on_sanity_check_start", 0),
    ("on_train_start", 0),
    ("on_train_epoch_start", 0),
    ("on_train_batch_end", 0),
    ("on_train_batch_end", 2),
    ("on_validation_start", 0),
    ("on_validation_batch_end", 1),
    ("on_validation_end", 0),
    ("on_train_epoch_end", 0),
]


def fit(folder, *callbacks, rounds=4, **options):
    """A run of a script that knows nothing of SLURM: Lightning finds the checkpoint of a job that was started again."""
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    return play(
        folder,
        rounds,
        METHOD,
        checkpoint=saver,
        more=callbacks,
        data=Toy(),
        num_sanity_val_steps=1,
        **{"default_root_dir": folder, **options},
    )


def history(folder):
    results = json.loads((folder / "results.json").read_text())
    return [entry["round"] for entry in results["history"]], results["accuracy"]


@pytest.mark.parametrize(("hook", "batch"), MOMENTS, ids=[f"{hook}-{batch}" for hook, batch in MOMENTS])
def test_a_signal_at_any_moment_finishes_the_round_and_the_job_goes_on_exactly(tmp_path, monkeypatch, hook, batch):
    whole = fit(tmp_path / "whole")
    calls = enter_job(monkeypatch, tmp_path, then="kill -TERM $PPID")
    with pytest.raises(SystemExit):
        fit(tmp_path / "job", SignalAt(hook, 1, batch))
    assert calls.read_text() == "requeue 17\n"
    [saved] = (tmp_path / "job").glob("hpc_ckpt_*.ckpt")
    loop = torch.load(saved, weights_only=True)["callbacks"]["FederatedLoop"]
    assert not loop["in_round"]

    resumed = fit(tmp_path / "job")
    assert_same(whole_state(resumed), whole_state(whole))
    assert history(tmp_path / "job") == history(tmp_path / "whole")
    assert history(tmp_path / "job")[0] == [1, 2, 3, 4]


def test_trainers_of_clients_do_not_go_on_from_the_checkpoint_of_the_job(tmp_path, monkeypatch):
    """A script's Trainer and those of its clients have one folder by default, the working directory."""
    monkeypatch.chdir(tmp_path)
    whole = fit("whole", engine=TrainerEngine())
    enter_job(monkeypatch, tmp_path, then="kill -TERM $PPID")
    with pytest.raises(SystemExit):
        fit("job", SignalAt("on_train_batch_end", 1), engine=TrainerEngine(), default_root_dir=None)
    assert list(tmp_path.glob("hpc_ckpt_*.ckpt"))
    resumed = fit("job", engine=TrainerEngine(), default_root_dir=None)
    assert_same(whole_state(resumed), whole_state(whole))


def test_the_end_of_the_job_before_the_end_of_the_round_drops_the_round(tmp_path, monkeypatch):
    whole = fit(tmp_path / "whole")
    calls = enter_job(monkeypatch, tmp_path)
    with pytest.raises(SystemExit):
        fit(tmp_path / "job", SignalAt("on_train_batch_end", 2, 1, signals=("SIGUSR1", "SIGTERM")))
    assert calls.read_text() == "requeue 17\n"
    assert not list((tmp_path / "job").glob("hpc_ckpt_*.ckpt"))
    resumed = play(tmp_path / "job", 4, METHOD, ckpt_path=str(tmp_path / "job" / "epoch=1.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))


def test_the_end_of_the_job_alone_requeues_nothing(tmp_path, monkeypatch):
    calls = enter_job(monkeypatch, tmp_path)
    with pytest.raises(SystemExit):
        fit(tmp_path / "job", SignalAt("on_train_batch_end", 2, 1, signals=("SIGTERM",)))
    assert not calls.exists()


def test_a_job_that_cannot_be_requeued_is_said(tmp_path, monkeypatch):
    enter_job(monkeypatch, tmp_path, code=1)
    with (
        pytest.warns(UserWarning, match="job 17 could not be requeued .* submit it again"),
        pytest.raises(SystemExit),
    ):
        fit(tmp_path / "job", SignalAt("on_train_batch_end", 2, 1, signals=("SIGUSR1", "SIGTERM")))
