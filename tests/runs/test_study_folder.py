"""Runs in the folder of a study have the names that the study gives them."""

from pathlib import Path

import pytest
from _helpers.finished import write_run
from _helpers.studies import write_study

from pfl_lightning.report import read_run
from pfl_lightning.report.grouping import group_runs
from pfl_lightning.runs.folder import StudyPlace, study_place
from pfl_lightning.study.plan import plan_cells, plan_runs
from pfl_lightning.study.reader import read_study

DATA = {"few": {"fingerprint": "sha256:d"}, "many": {"fingerprint": "sha256:e"}}


def write(study, row, setting="all", seed=0, **changes):
    """A run of a study."""
    seed_folder = study / "runs" / setting / row / f"seed_{seed}"
    folder = write_run(seed_folder / "version_0", seed=seed, **changes)
    (seed_folder / "run.yaml").write_text("")
    return folder


def rows(*folders):
    return [(row.setting, row.label, len(row.runs)) for row in group_runs(map(read_run, folders))]


@pytest.mark.parametrize("setting", ["", "20 clients"])
def test_the_place_is_that_of_the_studys_plan(tmp_path, setting):
    settings = {"settings": {setting: {}}} if setting else {}
    study = read_study(write_study(tmp_path, methods={"FedAvg-FT": {}}, **settings))
    (run,) = plan_runs(study, plan_cells(study), tmp_path / "out")
    run.folder.mkdir(parents=True)
    run.config_file.write_text("")
    expected = StudyPlace((tmp_path / "out").resolve(), setting.replace(" ", "-"), "FedAvg-FT")
    assert study_place(run.folder / "version_0") == expected


def test_a_relative_path_has_a_place_too(tmp_path, monkeypatch):
    write(tmp_path / "study", "FedAvg-FT")
    monkeypatch.chdir(tmp_path / "study" / "runs" / "all" / "FedAvg-FT")
    assert study_place(Path("seed_0/version_0")).row == "FedAvg-FT"


@pytest.mark.parametrize("folder", ["runs/version_0", "a/b/c/d/seed_0/version_0", "version_0"])
def test_other_folders_have_none(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    ((tmp_path / folder).parent / "run.yaml").write_text("")
    assert study_place(tmp_path / folder) is None


def test_rows_have_the_names_of_the_study(tmp_path):
    tuned = {"model": {"method": {"class_path": "FedAvg", "init_args": {"fine_tune": "all"}}}}
    plain = {"model": {"method": {"class_path": "FedAvg", "init_args": {"fine_tune": None}}}}
    folders = [write(tmp_path, "FedAvg", seed=seed, config=plain) for seed in (0, 1)]
    folders.append(write(tmp_path, "FedAvg-FT", config=tuned))
    assert rows(*folders) == [("", "FedAvg", 2), ("", "FedAvg-FT", 1)]


def test_rows_that_differ_in_no_option_stay_apart(tmp_path):
    folders = [write(tmp_path, "one"), write(tmp_path, "two")]
    assert rows(*folders) == [("", "one", 1), ("", "two", 1)]


def test_settings_have_the_names_of_the_study(tmp_path):
    folders = [write(tmp_path, "FedAvg", setting, data={"name": "Digits", **DATA[setting]}) for setting in DATA]
    assert rows(*folders) == [("few", "FedAvg", 1), ("many", "FedAvg", 1)]
    same_data = [write(tmp_path / "other", "FedAvg", setting) for setting in DATA]
    assert rows(*same_data) == [("few", "FedAvg", 1), ("many", "FedAvg", 1)]


def test_rows_of_one_name_in_two_studies_are_named_by_what_differs(tmp_path):
    folders = [write(tmp_path / name, "FedAvg", method_arguments={"lr": lr}) for name, lr in (("a", 0.1), ("b", 0.2))]
    assert rows(*folders) == [("", "FedAvg, lr=0.1", 1), ("", "FedAvg, lr=0.2", 1)]


def test_a_run_beside_a_study_is_named_by_what_differs(tmp_path):
    folders = [write(tmp_path / "a", "Mine"), write_run(tmp_path / "runs", method_arguments={"lr": 0.2})]
    assert rows(*folders) == [("", "Mine", 1), ("", "FedAvg, lr=0.2", 1)]
    more = [write(tmp_path / "a", "Mine"), write_run(tmp_path / "more", seed=1)]
    assert [row[1:] for row in rows(*more)] == [("Mine", 2)]


def test_an_unfinished_run_of_a_study_says_so(tmp_path):
    folder = write(tmp_path, "FedAvg-FT", finished=False)
    with pytest.warns(UserWarning, match="is not finished"):
        assert rows(folder) == [("", "FedAvg-FT, unfinished", 1)]
