"""What a run of the command line leaves behind, and that nothing of an earlier run is lost."""

import csv
import errno
import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from _helpers.configs import SMALL, digits_config
from _helpers.results import valid, without_seconds
from PIL import Image

from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli import main
from pfl_lightning.errors import CheckpointError, DiskFullError, RunLockedError
from pfl_lightning.runs.folder import RunFolder, run_folder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.runs.reading import read_run
from pfl_lightning.state.checkpoints import AtomicCheckpointIO

CONFIG = Path(__file__).parents[2] / "configs" / "fedpac_digits.yaml"


def pfl(monkeypatch, *args):
    monkeypatch.setattr("sys.argv", ["pfl", *args])
    main()


def fit(monkeypatch, tmp_path, *args, config=CONFIG, rounds=2):
    small = SMALL if config is CONFIG else ()
    pfl(
        monkeypatch,
        "fit",
        f"--config={config}",
        *small,
        f"--run_dir={tmp_path / 'runs'}",
        f"--trainer.max_epochs={rounds}",
        *args,
    )


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_saved_config_makes_a_new_run_with_the_same_numbers(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path)
    first = tmp_path / "runs" / "version_0"
    before = files(first)
    fit(monkeypatch, tmp_path, config=first / "config.yaml")
    second = tmp_path / "runs" / "version_1"
    assert files(first) == before
    assert {p.name for p in (second / "checkpoints").iterdir()} >= {"last.ckpt"}
    results = [without_seconds(valid(run / "results.json")) for run in (first, second)]
    assert results[0] == results[1]


def test_a_copied_run_is_evaluated_where_it_lies(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path)
    first, copied = tmp_path / "runs" / "version_0", tmp_path / "copied" / "version_0"
    shutil.copytree(first, copied)
    before, words = files(tmp_path / "runs"), [f"--config={copied / 'config.yaml'}"]
    pfl(monkeypatch, "test", *words, f"--ckpt_path={copied / 'checkpoints' / 'last.ckpt'}")
    assert valid(copied / "test.json")["accuracy"]["last"]["round"] == 2
    assert files(tmp_path / "runs") == before
    other = tmp_path / "others"
    pfl(monkeypatch, "test", *words, f"--ckpt_path={copied / 'checkpoints' / 'last.ckpt'}", f"--run_dir={other}")
    assert (other / "version_0" / "test.json").is_file()


@pytest.mark.parametrize("logger", ["lightning.pytorch.loggers.CSVLogger", "false"])
def test_everything_lies_in_the_runs_folder_whatever_the_logger(monkeypatch, tmp_path, logger):
    options = [f"--trainer.logger={logger}"]
    if logger != "false":
        options.append(f"--trainer.logger.init_args.save_dir={tmp_path / 'csv'}")
    for _ in range(2):
        fit(monkeypatch, tmp_path, *options, rounds=1)
    for version in ("version_0", "version_1"):
        names = {p.relative_to(tmp_path / "runs" / version).as_posix() for p in files(tmp_path / "runs" / version)}
        assert names == {
            "results.json",
            "clients.csv",
            "client_curves.csv",
            "partition.npz",
            "config.yaml",
            "checkpoints/last.ckpt",
            "checkpoints/best-round-1.ckpt",
        }


def test_another_partition_is_refused_and_leaves_the_run_as_it_was(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, rounds=1)
    before = files(tmp_path / "runs")
    with pytest.raises(SystemExit, match="another partition"):
        fit(monkeypatch, tmp_path, "--ckpt_path=last", "--data.init_args.partition.init_args.seed=5")
    after = files(tmp_path / "runs")
    assert {path: after[path] for path in before if "tfevents" not in path.name} == {
        path: content for path, content in before.items() if "tfevents" not in path.name
    }


def test_best_is_the_best_round_and_not_the_newest_file(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, "--checkpoint.save_top_k=-1", rounds=3)
    run = tmp_path / "runs" / "version_0"
    history = json.loads((run / "results.json").read_text())["history"]
    best = max(
        history, key=lambda row: row["validation"]["accuracy"]
    )  # the first of equals, as ModelCheckpoint keeps it
    for number, path in enumerate(sorted((run / "checkpoints").glob("best*"), reverse=True)):
        os.utime(path, (number, number))
    assert RunFolder(tmp_path / "runs").find_checkpoint("best").name == f"best-round-{best['round']}.ckpt"


WORST = """
- class_path: lightning.pytorch.callbacks.ModelCheckpoint
  init_args: {monitor: val_accuracy/mean, mode: min, filename: "worst-{epoch}"}
- class_path: lightning.pytorch.callbacks.ModelCheckpoint
  init_args: {filename: "kept-{epoch}", save_top_k: -1}
"""


def test_checkpoints_of_the_user_s_are_apart(monkeypatch, tmp_path):
    """From the best and the last round, in their names and in their states."""
    callbacks = tmp_path / "callbacks.yaml"
    callbacks.write_text(f"trainer:\n  callbacks:{WORST.replace(chr(10), chr(10) + '    ')}")
    fit(monkeypatch, tmp_path, f"--config={callbacks}", rounds=4)
    run = tmp_path / "runs" / "version_0"
    chosen = valid(run / "results.json")["accuracy"]["validation_selected"]["round"]
    assert RunFolder(tmp_path / "runs").find_checkpoint("best").name == f"best-round-{chosen}.ckpt"
    whole = {path.name for path in (run / "checkpoints").iterdir()}
    known = torch.load(run / "checkpoints" / "kept-epoch=1.ckpt", weights_only=True)["callbacks"]
    best = next(state for key, state in known.items() if key.startswith("BestRound"))
    writer = next(state for key, state in known.items() if key.startswith("ResultsWriter"))
    assert Path(best["best_model_path"]).name == f"best-round-{writer['chosen']['validation_selected']['round']}.ckpt"
    fit(monkeypatch, tmp_path, f"--config={callbacks}", rounds=2)
    resumed = tmp_path / "runs" / "version_1"
    fit(
        monkeypatch, tmp_path, f"--config={callbacks}", f"--ckpt_path={resumed / 'checkpoints' / 'last.ckpt'}", rounds=4
    )
    assert {path.name for path in (resumed / "checkpoints").iterdir()} == whole
    states = torch.load(resumed / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    kept = next(
        state for key, state in states.items() if "'monitor': None" in key and key.startswith("ModelCheckpoint")
    )
    assert Path(kept["best_model_path"]).name == "kept-epoch=3.ckpt"


def test_an_older_run_is_taken_with_a_warning(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, rounds=1)
    (tmp_path / "runs" / "version_1").mkdir()
    with pytest.warns(UserWarning, match=r"version_1 has no such checkpoint; using .*version_0"):
        found = RunFolder(tmp_path / "runs").find_checkpoint("last")
    assert found == tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt"


def test_last_is_of_the_run_that_has_the_config_and_not_of_a_later_trial(monkeypatch, tmp_path, capsys):
    fit(monkeypatch, tmp_path, rounds=2)
    fit(monkeypatch, tmp_path, "--model.method.init_args.lr=0.5", rounds=1)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ckpt_path")
        pfl(monkeypatch, "test", f"--config={CONFIG}", *SMALL, f"--run_dir={tmp_path / 'runs'}", "--ckpt_path=last")
    run = tmp_path / "runs" / "version_0"
    assert f"--ckpt_path last: {run}/checkpoints/last.ckpt" in capsys.readouterr().out
    found = valid(run / "test.json")
    assert (found["rounds"], found["checkpoint"], found["method_arguments"]["lr"]) == (2, "last.ckpt", 0.02)
    with (run / "test_clients.csv").open() as file:
        accuracies = [float(row["test_accuracy"]) for row in csv.DictReader(file)]
    assert found["accuracy"]["last"]["test"]["mean"] == pytest.approx(sum(accuracies) / 4)
    results = valid(run / "results.json")
    assert found["accuracy"]["last"]["test"] == pytest.approx(results["accuracy"]["last"]["test"])


def test_a_run_that_goes_on_with_other_options_says_which_and_keeps_them(monkeypatch, tmp_path, capsys):
    fit(monkeypatch, tmp_path, rounds=1)
    run = tmp_path / "runs" / "version_0"
    capsys.readouterr()
    fit(monkeypatch, tmp_path, "--ckpt_path=last", rounds=1)
    assert "other options" not in capsys.readouterr().out
    assert not (run / "changes.json").exists()
    fit(monkeypatch, tmp_path, "--ckpt_path=last", "--model.method.init_args.lr=0.5", rounds=2)
    said = capsys.readouterr().out
    assert f"{run} resumes with different options (see changes.json): " in said
    assert "trainer.max_epochs: 1 -> 2" in said
    assert "model.method.init_args.lr: 0.02 -> 0.5" in said
    [entry] = json.loads((run / "changes.json").read_text())
    assert (entry["config"], entry["from_round"]) == ("config-resumed-2.yaml", 2)
    assert {"option": "model.method.init_args.lr", "before": 0.02, "now": 0.5, "known": True} in entry["changes"]


def test_an_evaluation_with_other_options_than_the_run_s_says_which(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, "--seed_everything=3", rounds=1)
    last = tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt"
    common = ("test", f"--config={CONFIG}", *SMALL, f"--run_dir={tmp_path / 'runs'}")
    for wanted in ("last", str(last)):
        said = r"version_0, whose config differs .*seed_everything: 3 -> 0.*--config \S+config.yaml for"
        with pytest.warns(UserWarning, match=said):
            pfl(monkeypatch, *common, f"--ckpt_path={wanted}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*other options")
        pfl(monkeypatch, "test", f"--config={last.parents[1] / 'config.yaml'}", "--ckpt_path=last")


def test_evaluations_of_rounds_that_are_played_again_are_set_aside(monkeypatch, tmp_path):
    keep = "--checkpoint.save_top_k=-1"
    fit(monkeypatch, tmp_path, keep, rounds=2)
    run = tmp_path / "runs" / "version_0"
    for command in ("test", "validate", "personalize"):
        pfl(monkeypatch, command, f"--config={CONFIG}", *SMALL, f"--run_dir={tmp_path / 'runs'}", "--ckpt_path=last")
    names = {"test": "test_clients", "validate": "validate_clients", "personalized": "personalized"}
    before = {name: (run / f"{name}.json").read_bytes() for name in names}
    fit(monkeypatch, tmp_path, keep, "--ckpt_path=last", rounds=3)  # these rounds stay
    assert {name: (run / f"{name}.json").read_bytes() for name in names} == before
    with pytest.warns(UserWarning, match=r"test-1\.json is an evaluation of a round that is run again"):
        fit(monkeypatch, tmp_path, keep, f"--ckpt_path={run / 'checkpoints' / 'best-round-1.ckpt'}", rounds=3)
    for name, rows in names.items():
        assert not (run / f"{name}.json").exists()
        assert not (run / f"{rows}.csv").exists()
        assert (run / f"{name}-1.json").read_bytes() == before[name]
        assert (run / f"{rows}-1.csv").is_file()


def test_another_seed_does_not_go_on_with_a_run(monkeypatch, tmp_path, capsys):
    fit(monkeypatch, tmp_path, rounds=1)
    before = files(tmp_path / "runs")
    with pytest.raises(SystemExit, match=r"^2$"):
        fit(monkeypatch, tmp_path, "--ckpt_path=last", "--seed_everything=1")
    assert "version_0 has the seed 0, but would resume with the seed 1: a run has one" in capsys.readouterr().err
    assert files(tmp_path / "runs") == before


def test_a_new_folder_that_goes_on_with_another_runs_checkpoint(monkeypatch, tmp_path, capsys):
    fit(monkeypatch, tmp_path, rounds=1)
    last = f"--ckpt_path={tmp_path / 'runs' / 'version_0' / 'checkpoints' / 'last.ckpt'}"
    elsewhere = f"--run_dir={tmp_path / 'elsewhere'}"
    with pytest.raises(SystemExit, match=r"^2$"):
        fit(monkeypatch, tmp_path, last, elsewhere, "--seed_everything=1")
    assert "version_0 has the seed 0, but would resume with the seed 1" in capsys.readouterr().err
    fit(monkeypatch, tmp_path, last, elsewhere, "--model.method.init_args.lr=0.5")
    assert "model.method.init_args.lr: 0.02 -> 0.5" in capsys.readouterr().out
    [entry] = json.loads((tmp_path / "elsewhere" / "version_0" / "changes.json").read_text())
    assert (entry["config"], entry["from_round"]) == ("config.yaml", 2)
    assert "model.method.init_args.lr" in [change["option"] for change in entry["changes"]]


def test_runs_lie_below_the_trainers_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    small = [f"--config={CONFIG}", *SMALL, f"--trainer.default_root_dir={root}", "--run_dir=runs/x"]
    pfl(monkeypatch, "fit", *small, "--trainer.max_epochs=1")
    run = root / "runs" / "x" / "version_0"
    assert {"results.json", "config.yaml", "checkpoints"} <= {path.name for path in run.iterdir()}
    pfl(monkeypatch, "test", *small, "--ckpt_path=last")
    assert (run / "test.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_log_of_a_fit_has_a_line_a_round_and_no_bar(monkeypatch, tmp_path, capsys):
    small = [word for word in SMALL if "progress_bar" not in word]
    pfl(monkeypatch, "fit", f"--config={CONFIG}", *small, f"--run_dir={tmp_path}", "--trainer.max_epochs=2")
    said = "".join(capsys.readouterr())
    assert [line[:11] for line in said.splitlines() if line.startswith("round")] == ["round 1/2: ", "round 2/2: "]
    assert "it/s" not in said


def write_images(root, seed):
    draw = np.random.default_rng(seed)
    for part, count in (("train", 12), ("test", 4)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                picture = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(picture).save(root / part / name / f"{number}.png")


def test_a_run_that_goes_on_with_other_images_says_so(monkeypatch, tmp_path):
    for seed, name in enumerate(("a", "b")):
        write_images(tmp_path / name, seed)
    data = {"root": str(tmp_path / "a"), "partition": {"class_path": "IID", "init_args": {"num_clients": 2}}}
    changes = {
        "model.encoder": {"class_path": "SmallCNN"},
        "data": {"class_path": "ImageFolder", "init_args": {**data, "validation_share": 0.0}},
    }
    config = digits_config(tmp_path, changes)
    common = (f"--config={config}", "--trainer.enable_progress_bar=false")
    pfl(monkeypatch, "fit", *common, "--trainer.max_epochs=1")
    other = f"--data.init_args.root={tmp_path / 'b'}"
    with pytest.warns(UserWarning, match="trained on other data .* is evaluated"):
        pfl(monkeypatch, "test", *common, other, "--ckpt_path=last")
    with pytest.warns(UserWarning, match="trained on other data .* continues"):
        pfl(monkeypatch, "fit", *common, other, "--ckpt_path=last", "--trainer.max_epochs=2")
    run = tmp_path / "runs" / "version_0"
    [entry] = json.loads((run / "changes.json").read_text())
    change = next(change for change in entry["changes"] if change["option"] == "data.fingerprint")
    assert (
        change["before"] != change["now"] == valid(run / "results.json")["data"]["fingerprint"].removeprefix("sha256:")
    )
    assert "data.fingerprint" in " ".join(read_run(run).options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*other data")
        pfl(monkeypatch, "fit", *common, other, "--ckpt_path=last", "--trainer.max_epochs=3")


def test_without_validation_parts_there_is_no_best_round(monkeypatch, tmp_path, capsys):
    share = "--data.init_args.validation_share=0.0"
    fit(monkeypatch, tmp_path, share, rounds=1)
    common = (f"--config={CONFIG}", *SMALL, f"--run_dir={tmp_path / 'runs'}", share)
    with pytest.raises(SystemExit, match=r"best: there is none in .* the last one, and a best one where .*validation"):
        pfl(monkeypatch, "test", *common, "--ckpt_path=best")
    capsys.readouterr()
    pfl(monkeypatch, "validate", *common, "--ckpt_path=last")
    assert "No client has a validation part, or limit_val_batches is 0: nothing" in capsys.readouterr().out


def test_no_checkpoint_says_where_it_looked(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is none in .*version_\*/checkpoints"):
        RunFolder(tmp_path).find_checkpoint("last")


def test_clients_too_small_for_a_validation_part(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, "--data.init_args.partition.init_args.samples_per_client=12",
        "--data.init_args.validation_share=0.01", rounds=1)  # fmt: skip
    run = tmp_path / "runs" / "version_0"
    assert json.loads((run / "results.json").read_text())["accuracy"]["validation_selected"] is None
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]


def test_evaluating_without_a_checkpoint_is_said(monkeypatch, tmp_path):
    with pytest.warns(UserWarning, match="evaluates a model that was not trained"):
        pfl(monkeypatch, "test", f"--config={CONFIG}", *SMALL, f"--run_dir={tmp_path / 'runs'}")


def test_a_kill_while_saving_leaves_the_old_checkpoint(monkeypatch, tmp_path):
    path = tmp_path / "last.ckpt"
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint({"round": 1}, path)

    def half(checkpoint, file):
        file.write(b"half a checkp")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"round": 2}, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.load(path, weights_only=True) == {"round": 1}
    plugin.save_checkpoint({"round": 2}, path)
    assert torch.load(path, weights_only=True) == {"round": 2}


def test_a_run_without_checkpoints_has_results_alone(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, "--trainer.enable_checkpointing=false", rounds=1)
    run = tmp_path / "runs" / "version_0"
    assert (run / "results.json").is_file()
    assert not (run / "checkpoints").exists()


def test_runs_that_start_at_once_get_a_folder_each(tmp_path):
    runs, start, found = RunFolder(tmp_path / "runs"), threading.Barrier(16), []

    def ask():
        start.wait()
        found.append(runs.new())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(runs.base / f"version_{number}" for number in range(16))
    assert runs.versions() == [runs.base / f"version_{number}" for number in range(16)]


def test_a_run_that_is_refused_leaves_no_folder_behind(monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        fit(monkeypatch, tmp_path, "--loop.cohort=0")
    fit(monkeypatch, tmp_path, "--trainer.fast_dev_run=true", "--trainer.logger=false")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_refused_once_its_logger_is_there_leaves_no_folder_either(monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        fit(monkeypatch, tmp_path, "--model.encoder=googlenet")
    assert not (tmp_path / "runs").exists()


def test_a_best_round_by_a_value_that_is_not_there_is_told(monkeypatch, tmp_path):
    with pytest.warns(UserWarning, match=r"do not log 'val_accuracy/men': set its monitor to one of .*accuracy/mean"):
        fit(monkeypatch, tmp_path, "--checkpoint.monitor=val_accuracy/men")


def test_a_run_is_locked_while_it_is_trained_and_can_be_evaluated_meanwhile(monkeypatch, tmp_path):
    fit(monkeypatch, tmp_path, rounds=1)
    run = tmp_path / "runs" / "version_0"
    before = files(run)
    with RunLock(run):
        with pytest.raises(SystemExit, match=rf"version_0 is being trained by process {os.getpid()} on .*: wait until"):
            fit(monkeypatch, tmp_path, "--ckpt_path=last")
        assert {path: content for path, content in files(run).items() if path.name != ".lock"} == before
        pfl(monkeypatch, "test", f"--config={CONFIG}", *SMALL, f"--run_dir={run.parent}", "--ckpt_path=last")
    locked = []
    validation_end = FederatedLoop.on_validation_end

    def look(loop, trainer, module):
        with pytest.raises(RunLockedError):
            RunLock(run)
        locked.append(trainer.current_epoch)
        validation_end(loop, trainer, module)

    monkeypatch.setattr(FederatedLoop, "on_validation_end", look)
    fit(monkeypatch, tmp_path, "--ckpt_path=last", rounds=2)
    assert locked[-1] == 1
    assert not (run / ".lock").exists()


def test_half_written_files_of_a_killed_process_are_removed_but_only_under_the_lock(tmp_path, monkeypatch):
    run = tmp_path / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    half = [run / ".results.json.tmp", run / "checkpoints" / ".best-round-2.ckpt.tmp"]
    for path in half:
        path.touch()
    with run_folder(RunFolder(tmp_path), run, lock=False):
        assert all(path.exists() for path in half)
    with run_folder(RunFolder(tmp_path), run, lock=True):
        assert not any(path.exists() for path in half)
    assert run.is_dir()


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path, monkeypatch):
    def full(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskFullError, match=f"{tmp_path / 'runs'} cannot be written"):
        run_folder(RunFolder(tmp_path / "runs"), None, lock=True).__enter__()


@pytest.mark.parametrize("wanted", ["last", "best"])
def test_a_damaged_checkpoint_is_one_sentence_with_the_others_beside_it(monkeypatch, tmp_path, wanted):
    fit(monkeypatch, tmp_path, rounds=1)
    folder = tmp_path / "runs" / "version_0" / "checkpoints"
    shutil.copy(folder / "last.ckpt", folder / "kept.ckpt")
    (folder / "best-round-1.ckpt").unlink()
    (folder / "last.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:500])
    sentence = rf"pfl: the checkpoint {folder / 'last.ckpt'} is truncated or damaged.*; the others in .* are kept.ckpt"
    with pytest.raises(SystemExit, match=rf"^{sentence}\n"):
        fit(monkeypatch, tmp_path, f"--ckpt_path={wanted}")


@pytest.mark.parametrize("full", ["last.ckpt", "results.json", "config.yaml"])
def test_a_full_disk_ends_with_a_sentence_and_the_run_goes_on_once_there_is_room(monkeypatch, tmp_path, full):
    fit(monkeypatch, tmp_path, rounds=1)
    replace = os.replace

    def refuse(source, target):
        if Path(target).name == full or (full == "config.yaml" and "config" in Path(target).name):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        needs = r"cannot be written \(No space left on device\): it needs \S+ .?B or more, and \S+ .B are free in"
        with pytest.raises(SystemExit, match=rf"^pfl: .*{needs}"):
            fit(monkeypatch, tmp_path, "--ckpt_path=last", rounds=2)
    fit(monkeypatch, tmp_path, "--ckpt_path=last", rounds=3)
    run = tmp_path / "runs" / "version_0"
    assert [row["round"] for row in json.loads((run / "results.json").read_text())["history"]] == [1, 2, 3]
    assert not list(run.rglob("*.tmp"))
