"""Versions in a run's folder that somebody has made by hand, and runs that somebody went on with."""

import pytest
from _helpers.studies import finish, write_study

from pfl_lightning.study.options import with_option, write_yaml
from pfl_lightning.study.plan import plan_cells, plan_runs
from pfl_lightning.study.reader import read_study
from pfl_lightning.study.runner import RunState, difference, finished_folder, last_checkpoint, run_job, state_of

OF_A_STUDY = [{"class_path": "pfl_lightning.study.callbacks.ProgressFile", "init_args": {"path": "p.json"}}]


@pytest.fixture
def run(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0]))
    return plan_runs(study, plan_cells(study), tmp_path / "out")[0]


def made(run, number, config, *resumed):
    """A version with a checkpoint and results."""
    version = run.folder / f"version_{number}"
    (version / "checkpoints").mkdir(parents=True, exist_ok=True)
    (version / "checkpoints" / "last.ckpt").touch()
    (version / "results.json").write_text('{"finished": true}')
    write_yaml(version / "config.yaml", config)
    for place, own in enumerate(resumed, 1):
        write_yaml(version / f"config-resumed-{place}.yaml", own)
    return version


def as_saved(run, **options):
    """The config that the command line saves of a run's: with defaults, classes by their paths, and the callback."""
    config = with_option(run.config, "model.method", {"class_path": "pfl_lightning.methods.FedAvg", "init_args": {}})
    config = with_option(config, "trainer.callbacks", OF_A_STUDY)
    for name, value in options.items():
        config = with_option(config, name.replace("__", "."), value)
    return config


def test_the_first_version_of_a_study_is_the_run(run):
    """Whatever somebody has tried beside it, with the run's own config or with that of its version."""
    tried = made(run, 0, with_option(as_saved(run), "trainer.callbacks", None))
    assert finished_folder(run) is last_checkpoint(run) is None
    assert state_of(run) is RunState.NEW
    own = made(run, 1, as_saved(run))
    made(run, 2, as_saved(run, model__method__init_args__lr=0.5))
    assert finished_folder(run) == own
    assert last_checkpoint(run) == own / "checkpoints" / "last.ckpt"
    assert state_of(run) is RunState.DONE
    assert tried.is_dir()


def test_a_run_without_a_checkpoint_starts_over_in_a_folder_of_its_own(run):
    version = made(run, 0, as_saved(run))
    (version / "checkpoints" / "last.ckpt").unlink()
    made(run, 1, as_saved(run, model__method__init_args__lr=0.5))
    run_job(run)
    assert finished_folder(run) is last_checkpoint(run) is None  # not what somebody has tried
    assert (run.folder / "set_aside_1" / "results.json").is_file()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model.method.init_args.lr", 0.5),
        ("model.method.init_args.momentum", 0.9),
        ("loop.cohort", 0.5),
        ("trainer.max_epochs", 7),
        ("model.engine", {"class_path": "TrainerEngine", "init_args": {"max_steps": 1}}),
    ],
)
def test_a_run_that_went_on_by_hand_with_other_options_is_changed(run, option, value):
    defaults = {
        "model__method__init_args__momentum": 0.5,
        "loop__cohort": 1.0,
        "model__engine": {"class_path": "SequentialEngine", "init_args": {"threads": 1}},
    }
    saved = as_saved(run, **defaults)
    made(run, 0, saved, with_option(saved, option, value), saved)
    assert option in difference(run)
    assert state_of(run) is RunState.CHANGED


def test_a_run_that_went_on_with_its_own_options_is_not(run):
    saved = as_saved(run)
    others = with_option(with_option(saved, "trainer.enable_progress_bar", True), "trainer.callbacks", None)
    made(run, 0, saved, with_option(others, "data.init_args.root", "elsewhere"))
    assert state_of(run) is RunState.DONE


def test_a_process_that_was_killed_early_leaves_no_config(run):
    finish(run.folder, finished=False)
    assert state_of(run) is RunState.UNFINISHED
