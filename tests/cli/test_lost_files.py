"""Files of a run that are taken away while it runs: a sentence that names the file, and nothing else is lost."""

import json
import re
import shutil

import pytest
from _helpers.configs import digits_config

from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli import main
from pfl_lightning.runs.lock import RunLock


def remove(run):
    shutil.rmtree(run)


def replace_by_a_file(run):
    shutil.rmtree(run)
    run.write_text("in its place")


def make_folders_of_events(run):
    for events in run.glob("events*"):
        events.unlink()
        events.mkdir()


def fill_the_disk_of_events(run):
    for events in run.glob("events*"):
        events.unlink()
        events.symlink_to("/dev/full")


def make_a_folder_of_metrics(run):
    (run / "metrics.csv").unlink(missing_ok=True)
    (run / "metrics.csv").mkdir()


def close_the_checkpoints(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("in its place")


def fit(tmp_path, monkeypatch, hurt, *words, round=1):
    """What a run of four rounds says whose folder is hurt in the middle of a round."""
    begin = FederatedLoop.on_train_epoch_start

    def begin_and_hurt(loop, trainer, pl_module):
        begin(loop, trainer, pl_module)
        if trainer.current_epoch == round:
            hurt(tmp_path / "runs" / "version_0")

    with monkeypatch.context() as patch:
        patch.setattr(FederatedLoop, "on_train_epoch_start", begin_and_hurt)
        config = digits_config(tmp_path, {"trainer.max_epochs": 4})
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", config, *words])
    return ended.value.code


CSV = (
    "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
    "--trainer.logger.flush_logs_every_n_steps=1",
    "--trainer.logger.name=runs",
    "--trainer.logger.version=version_0",
)


@pytest.mark.filterwarnings("ignore:the results could not be written")
@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (remove, r"\[Errno \d+\] No such file or directory: .*/events"),
        (replace_by_a_file, r"\[Errno \d+\] Not a directory: "),
        (make_folders_of_events, r"\[Errno \d+\] Is a directory: .*/events"),
        (fill_the_disk_of_events, r".* cannot be written \(No space left on device\): "),
        (make_a_folder_of_metrics, r"\[Errno \d+\] Is a directory: .*/metrics\.csv"),
        (close_the_checkpoints, r"\[Errno \d+\] (File exists|Not a directory): .*/checkpoints"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_sentence_and_the_rest_stays(tmp_path, monkeypatch, hurt, said):
    logger = (*CSV, f"--trainer.logger.save_dir={tmp_path}") if hurt is make_a_folder_of_metrics else ()
    code = fit(tmp_path, monkeypatch, hurt, *logger)
    run = tmp_path / "runs" / "version_0"
    assert re.match(f"pfl: {said}", str(code))
    if run.is_dir():
        assert json.loads((run / "results.json").read_text())["rounds"] in (
            1,
            2,
        )  # noticed before the round is over, or after it
    if hurt in (make_folders_of_events, fill_the_disk_of_events):
        monkeypatch.setattr("sys.argv", ["pfl"])
        main(["fit", "--config", str(tmp_path / "config.yaml"), f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"])
        assert [row["round"] for row in json.loads((run / "results.json").read_text())["history"]] == [1, 2, 3, 4]


def test_a_run_whose_folder_another_one_has_got_leaves_it_alone(tmp_path, monkeypatch):
    """The folder was removed, and a new run has got its number."""
    run, locks = tmp_path / "runs" / "version_0", []

    def take_over(run):
        remove(run)
        run.mkdir()
        locks.append(RunLock(run))

    code = fit(tmp_path, monkeypatch, take_over, "--trainer.logger=false")
    assert f"the run {run} is being trained by process" in code
    assert [path.name for path in run.iterdir()] == [".lock"]
    locks[0].release()
