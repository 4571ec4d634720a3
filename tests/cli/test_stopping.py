"""Commands that are stopped from outside, and the commands that resume them: nothing is lost."""

import csv
import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from _helpers.results import without_seconds
from _helpers.slurm import SignalAt, enter_job
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.cli import main
from pfl_lightning.cli.federated_cli import FederatedCLI
from pfl_lightning.cli.stopping import how_to_go_on, stopping_signal
from pfl_lightning.errors import FederationError
from pfl_lightning.runs.folder import RunFolder

CONFIG = Path(__file__).parents[2] / "configs" / "fedpac_digits.yaml"
OPTIONS = {
    "model.encoder": "mlp",
    "model.method.init_args.epochs": 1,
    "data.init_args.partition.init_args.num_clients": 4,
    "data.init_args.partition.init_args.samples_per_client": 30,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.num_sanity_val_steps": 0,
}


def words(run_dir, *more, rounds=4):
    return [
        "fit",
        f"--config={CONFIG}",
        *(f"--{name}={value}" for name, value in OPTIONS.items()),
        f"--trainer.max_epochs={rounds}",
        f"--run_dir={run_dir}",
        *more,
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    main(words(folder))
    return folder / "version_0"


@pytest.fixture
def send(monkeypatch):
    """Let runs get signals: called with what ``SignalAt`` takes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it starts ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
    monkeypatch.setattr(FederatedCLI, "_configured", configured := _Configured(FederatedCLI._configured))
    yield configured.add
    for number, handler in handlers.items():
        signal.signal(number, handler)


class _Configured:
    """Callbacks that a config does not name: they are for the next command only."""

    def __init__(self, configured):
        self.configured, self.more = configured, []

    def __get__(self, cli, owner):
        return lambda name: [*self.configured(cli, name), *(self._take() if name == "callbacks" else [])]

    def _take(self):
        more, self.more = self.more, []
        return more

    def add(self, *args, **options):
        self.more.append(SignalAt(*args, **options))


def state(run):
    found = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return {name: value for name, value in found["state_dict"].items() if isinstance(value, torch.Tensor)}, found


def assert_same_run(run, other):
    """The same state, results and best rounds."""
    (tensors, found), (expected, whole) = state(run), state(other)
    assert found["epoch"] == whole["epoch"]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    results, wanted = (without_seconds(json.loads((path / "results.json").read_text())) for path in (run, other))
    assert results == wanted
    assert results["finished"]
    assert (run / "clients.csv").read_text() == (other / "clients.csv").read_text()
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (run, other)]
    assert names[0] == names[1]


def steps(run):
    """Steps of every scalar and tensor that TensorBoard shows."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    found = {tag: [event.step for event in events.Scalars(tag)] for tag in tags["scalars"]}
    return found | {tag: [event.step for event in events.Tensors(tag)] for tag in tags["tensors"]}


# ---------------------------------------------------------------------- exit codes and words


@pytest.mark.parametrize(
    ("number", "hook", "rounds"),
    [
        ("SIGTERM", "on_train_batch_end", 2),
        ("SIGTERM", "on_validation_batch_end", 3),
        ("SIGHUP", "on_train_batch_end", 2),
        ("SIGHUP", "on_validation_batch_end", 3),
        ("SIGINT", "on_train_batch_end", 2),
        ("SIGINT", "on_validation_end", 3),
    ],
)
def test_a_stopped_run_says_how_to_go_on_and_goes_on(tmp_path, capsys, whole, send, number, hook, rounds):
    send(hook, 2, 0, signals=(number,))
    with pytest.raises(SystemExit) as stopped:
        main(words(tmp_path))
    assert stopped.value.code == 128 + getattr(signal, number)
    run = tmp_path / "version_0"
    said = capsys.readouterr().err
    assert f"pfl: stopped by {number}. Resume after the last finished round with:\npfl fit" in said
    assert said.rstrip().endswith(f"--ckpt_path {run / 'checkpoints' / 'last.ckpt'}")
    results = json.loads((run / "results.json").read_text())
    assert (results["finished"], results["rounds"]) == (False, rounds)

    main(said[said.index("pfl fit ") :].split()[1:])
    assert_same_run(run, whole)
    for tag, logged in steps(run).items():
        assert logged == sorted(set(logged)), tag
    assert {tag: found for tag, found in steps(run).items() if "hp" not in tag} == {
        tag: found for tag, found in steps(whole).items() if "hp" not in tag
    }


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, "Input/output error"), signal.SIGHUP),  # of the terminal that is gone
        (OSError(errno.EIO, "Input/output error", "results.json"), None),
        (FederationError("the workers are gone"), signal.SIGHUP),
        (SystemExit(1), None),
    ],
)
def test_what_a_hangup_explains(error, number):
    assert stopping_signal(error, True, [signal.SIGHUP]) == number
    assert stopping_signal(error, False, []) is None


def test_a_hangup_that_is_ignored_stops_nothing(tmp_path, whole, send):
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    send("on_train_batch_end", 1, 0, signals=("SIGHUP",))
    main(words(tmp_path))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert_same_run(tmp_path / "version_0", whole)


def test_a_run_stopped_in_its_first_round_can_only_start_again(tmp_path, capsys, send):
    send("on_train_batch_end", 0, 0, signals=("SIGTERM",))
    with pytest.raises(SystemExit, match="143"):
        main(words(tmp_path))
    assert f"No round was saved in {tmp_path / 'version_0'}; the same command starts over." in capsys.readouterr().err
    assert not (tmp_path / "version_0" / "results.json").exists()


def test_the_command_names_one_checkpoint(tmp_path):
    last = tmp_path / "last.ckpt"
    last.touch()
    given = ["fit", "--ckpt_path", "last", "--ckpt_path=best", "--run_dir", "a b"]
    assert how_to_go_on(given, last).endswith(f"pfl fit --run_dir 'a b' --ckpt_path {last}")


# ---------------------------------------------------------------------- SLURM


@pytest.mark.parametrize("first", [[], ["--ckpt_path=last"]], ids=["new run", "resumed run"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_a_preempted_job_goes_on_with_its_run(tmp_path, whole, monkeypatch, send, first, hook):
    """The same command is started again, beside a newer run of another job in the same folder."""
    if first:
        main(words(tmp_path, rounds=1))
    with monkeypatch.context() as job:
        calls = enter_job(job, tmp_path / "job", then="kill -TERM $PPID")
        send(hook, 1, 0)
        with pytest.raises(SystemExit, match="143"):
            main(words(tmp_path, *first))
        assert calls.read_text() == "requeue 17\n"
        assert not list(tmp_path.rglob("hpc_ckpt*"))
    main(words(tmp_path, rounds=1))

    enter_job(monkeypatch, tmp_path / "job", restarts=1)
    main(words(tmp_path, *first))
    assert [path.name for path in RunFolder(tmp_path).versions()] == ["version_0", "version_1"]
    run = tmp_path / "version_0"
    (run / "slurm_job.json").unlink()
    assert_same_run(run, whole)


def test_another_command_of_the_same_job_makes_a_run_of_its_own(tmp_path, monkeypatch):
    enter_job(monkeypatch, tmp_path / "job")
    main(words(tmp_path, rounds=1))
    enter_job(monkeypatch, tmp_path / "job", restarts=1)
    main(words(tmp_path, "--seed_everything=1", rounds=1))
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    main(words(tmp_path, rounds=1))
    assert len(RunFolder(tmp_path).versions()) == 3


def test_checkpoints_of_slurm_in_the_folder_of_runs_are_left_alone(tmp_path, monkeypatch):
    """Lightning would go on from them, whatever run they are of."""
    enter_job(monkeypatch, tmp_path / "job")
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"of another run")
    main(words(tmp_path, rounds=1))
    assert (tmp_path / "version_0" / "results.json").is_file()


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("name", ["results.json", "clients.csv"])
def test_results_lost_after_the_last_checkpoint_are_written_on_resume(tmp_path, capsys, whole, monkeypatch, name):
    real = os.replace

    def full(source, target):
        if Path(target).name == name:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SystemExit, match=r"No space left .*resuming the run from its last checkpoint writes them"):
            main(words(tmp_path))
    run = tmp_path / "version_0"
    assert not (run / name).exists()
    assert "Results:" not in capsys.readouterr().out
    main(words(tmp_path, "--ckpt_path=last"))
    assert_same_run(run, whole)
    assert f"Results: {run}/results.json, clients.csv" in capsys.readouterr().out


def test_a_disk_that_is_full_when_the_run_fails_does_not_hide_why(tmp_path, monkeypatch, send):
    real = os.replace

    def full(source, target):
        if Path(target).name == "results.json":
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    send("on_train_batch_end", 1, 0, signals=("SIGTERM",))
    with (
        pytest.raises(SystemExit, match="143"),
        pytest.warns(UserWarning, match="could not be written: .*No space"),
    ):
        main(words(tmp_path))


# ---------------------------------------------------------------------- the best round


@pytest.mark.parametrize("moment", ["before last", "after last"])
def test_the_best_round_is_found_after_any_kill(tmp_path, whole, monkeypatch, moment):
    """Killed around the checkpoint of a round that is better than all before."""
    best = int(next((whole / "checkpoints").glob("best*")).stem.rpartition("-")[2]) - 1
    history = json.loads((whole / "results.json").read_text())["history"]
    assert best > 0, "the run must improve"
    assert history[best]["validation"]["accuracy"] > history[0]["validation"]["accuracy"]

    class Killed(BaseException):
        """Nothing but this is run after it, as after SIGKILL."""

    save = ModelCheckpoint.on_train_epoch_end

    def kill(callback, trainer, pl_module):
        is_last, now = callback.monitor is None, trainer.current_epoch == best
        if is_last and now and moment == "before last":
            raise Killed
        save(callback, trainer, pl_module)
        if is_last and now:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ModelCheckpoint, "on_train_epoch_end", kill)
        patch.setattr(ResultsWriter, "on_exception", lambda *_: None)
        with pytest.raises(Killed):
            main(words(tmp_path))
    (tmp_path / "version_0" / "checkpoints" / f".best-round-{best + 1}.ckpt.tmp").touch()
    found = RunFolder(tmp_path).find_checkpoint("best")
    assert torch.load(found, weights_only=True)["epoch"] == (best if moment == "after last" else _best(history, best))
    main(words(tmp_path, "--ckpt_path=last"))
    assert_same_run(tmp_path / "version_0", whole)


def _best(history, before):
    """The best of the rounds before one; the first of equals."""
    return max(range(before), key=lambda round: (history[round]["validation"]["accuracy"], -round))


def test_a_run_that_was_moved_keeps_its_best_round(tmp_path, whole):
    main(words(tmp_path / "old", rounds=2))
    (tmp_path / "old").rename(tmp_path / "new")
    main(words(tmp_path / "new", "--ckpt_path=last"))
    assert_same_run(tmp_path / "new" / "version_0", whole)


def test_clients_of_an_unfinished_run_are_all_there(tmp_path, send):
    send("on_train_batch_end", 2, 0, signals=("SIGTERM",))
    with pytest.raises(SystemExit):
        main(words(tmp_path))
    with (tmp_path / "version_0" / "clients.csv").open(newline="") as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
