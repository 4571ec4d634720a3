"""Versions in a run's folder that somebody has made by hand: which of them are the study's."""

from dataclasses import replace

import pytest
from _helpers.studies import write_study

from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.definition.options import with_option, write_yaml
from pfl_lightning.study.run_state import finished_folder, last_checkpoint, others_versions


@pytest.fixture
def runs(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0]))
    return plan_runs(study, plan_cells(study), tmp_path / "out")


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


OF_A_STUDY = [{"class_path": "pfl_lightning.study.callbacks.ProgressFile", "init_args": {"path": "p.json"}}]


def as_saved(run, **options):
    """The config that the command line saves of a run's: with defaults, and classes by their paths."""
    config = with_option(run.config, "model.method", {"class_path": "pfl_lightning.methods.FedAvg", "init_args": {}})
    config = with_option(config, "trainer.callbacks", OF_A_STUDY)
    for name, value in options.items():
        config = with_option(config, name.replace("__", "."), value)
    return config


@pytest.mark.parametrize(
    "other",
    [
        {"model__method__init_args__lr": 0.3},
        {"seed_everything": 9},
        {"trainer__max_epochs": 7},
        {"loop__cohort": 2},
        {"data__init_args__batch_size": 7},
    ],
)
def test_what_somebody_has_tried_with_a_runs_config_is_not_the_studys(runs, other):
    config = {**runs[0].config, "loop": {"cohort": 1}, "data": {"class_path": "Digits", "init_args": {"batch_size": 5}}}
    run = replace(runs[0], config=with_option(config, "model.method.init_args.lr", 0.1))
    saved = as_saved(run, model__method__init_args__lr=0.1)
    own = made(run, 0, saved)
    tried = made(
        run,
        1,
        with_option({**as_saved(run, **{"model__method__init_args__lr": 0.1, **other})}, "trainer.callbacks", None),
    )
    assert (finished_folder(run), last_checkpoint(run)) == (own, own / "checkpoints" / "last.ckpt")
    assert others_versions(run) == [tried]
    same = made(run, 2, with_option(saved, "trainer.callbacks", None))  # the run itself, by hand
    assert finished_folder(run) == same


def test_a_config_that_a_study_has_saved_and_somebody_has_changed_is_not_the_studys(runs):
    """It has the callback of a study, too."""
    run = replace(runs[0], config=with_option(runs[0].config, "model.method.init_args.lr", 1))
    saved = as_saved(run, model__method__init_args__lr=1.0)  # as the command line writes a rate of 1
    own = made(run, 0, saved)
    tried = made(run, 1, with_option(saved, "model.method.init_args.lr", 0.5))
    shorter = made(run, 2, with_option(saved, "trainer.max_epochs", 1))
    assert finished_folder(run) == own
    assert others_versions(run) == [tried, shorter]
    assert made(run, 0, saved, with_option(saved, "model.method.init_args.lr", 0.5)) == own
    assert finished_folder(run) is None


def test_a_run_that_went_on_by_hand_with_other_options_is_not_the_studys(runs):
    saved = as_saved(runs[0])
    by_hand = with_option(saved, "trainer.callbacks", None)
    version = made(runs[0], 0, saved, saved, by_hand)
    assert finished_folder(runs[0]) == version
    assert made(runs[0], 0, saved, with_option(by_hand, "model.method.init_args.epochs", 3), saved) == version
    assert finished_folder(runs[0]) is last_checkpoint(runs[0]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"loop__cohort": 0.5},
        {"model__method__init_args__momentum": 0.9},
        {"data__init_args__partition__class_path": "pfl_lightning.datamodules.IID"},
        {"model__encoder": "small_cnn"},
        {"model__engine": {"class_path": "TrainerEngine", "init_args": {"max_steps": 1}}},
    ],
)
def test_what_somebody_has_tried_of_options_that_the_study_leaves_alone_is_not_the_studys(runs, other):
    defaults = {
        "loop__cohort": 1.0,
        "model__method__init_args__momentum": 0.5,
        "data": {"class_path": "Digits", "init_args": {"partition": {"class_path": "DominantClasses"}}},
        "model__encoder": "mlp",
        "model__engine": {"class_path": "SequentialEngine", "init_args": {"threads": 1}},
        "trainer__enable_progress_bar": None,
    }
    own = made(runs[0], 0, as_saved(runs[0], **defaults))
    tried = made(runs[0], 1, as_saved(runs[0], **{**defaults, **other, "trainer__callbacks": None}))
    assert finished_folder(runs[0]) == own
    assert others_versions(runs[0]) == [tried]
    how = {"model__engine__init_args__threads": 2, "trainer__enable_progress_bar": True, "trainer__callbacks": None}
    same = made(runs[0], 2, as_saved(runs[0], **{**defaults, **how}))
    assert finished_folder(runs[0]) == same
