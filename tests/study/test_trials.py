"""Trials of a search, and what a search found for the rows of a study."""

import json
from types import SimpleNamespace

import pytest
from _helpers.studies import PretendedStarter, write_study

from pfl_lightning.jobs import supervision
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study import plan_cells, read_study, run_trial
from pfl_lightning.study.callbacks import ProgressFile
from pfl_lightning.study.definition.options import option_of, with_option
from pfl_lightning.study.definition.study import Dimension, Search
from pfl_lightning.study.run_state import read_progress
from pfl_lightning.study.searches import NoTrialError, searched_cells
from pfl_lightning.study.tuner import digest

CONFIG = {"trainer": {"max_epochs": 2}}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(supervision, "POLL", 0.01)
    monkeypatch.setattr(supervision, "AGAIN", 0.01)


class Starter(PretendedStarter):
    """Its runs have one validation accuracy, and a higher one in a round before."""

    def start(self, command):
        progress = {"round": 1, "rounds": 2, "seconds_per_round": 1.0, "validation": 0.5, "best_validation": 0.75}
        (command.log.parent / "progress.json").write_text(json.dumps(progress))
        return super().start(command)


@pytest.mark.parametrize(("choice", "accuracy"), [("last", 0.5), ("best_test", 0.75), ("validation_selected", 0.75)])
def test_the_validation_accuracy_of_a_trial_which_is_run_once(tmp_path, choice, accuracy):
    starter = Starter()
    for _ in range(2):
        assert run_trial(CONFIG, tmp_path / "trial_0", choice=choice, starter=starter) == accuracy
    assert len(starter.commands) == 1


def test_a_trial_of_another_config_starts_over(tmp_path):
    starter = Starter()
    run_trial(CONFIG, tmp_path / "trial_0", starter=starter)
    run_trial({"trainer": {"max_epochs": 3}}, tmp_path / "trial_0", starter=starter)
    assert len(starter.commands) == 2
    assert (tmp_path / "trial_0" / "set_aside_0" / "results.json").is_file()


def test_a_trial_that_fails_or_falls_behind(tmp_path):
    assert run_trial(CONFIG, tmp_path / "a" / "b", starter=Starter({"a": [1]})) is None
    starter, seen = Starter(endless=True), []

    def fall_behind(round, accuracy):
        seen.append((round, accuracy))
        return True

    assert run_trial(CONFIG, tmp_path / "trial_0", on_round=fall_behind, starter=starter) is None
    assert seen == [(1, 0.5)]
    assert starter.processes[0].stopped


def test_what_a_search_found_is_laid_over_its_rows(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": {"low": 0.01, "high": 0.1}}, "methods": ["FedPer"]}
    study = read_study(write_study(tmp_path, search=search, seeds=[4, 5]))
    cells, calls = plan_cells(study), []

    def find(asked, config, folder):
        calls.append((asked.trials, config["seed_everything"], folder))
        return {"model.method.lr": 0.07}

    ready, waiting = searched_cells(study, cells, tmp_path / "out")
    assert ([cell.label for cell in ready], [cell.label for cell in waiting]) == (["FedAvg"], ["FedPer"])
    for _ in range(2):  # the second time it is read
        ready, waiting = searched_cells(study, cells, tmp_path / "out", find)
    assert calls == [(3, 4, tmp_path / "out" / "search" / "all" / "FedPer")]
    assert waiting == []
    assert [option_of(cell.config, "model.method.lr") for cell in ready] == [0.05, 0.07]

    more = read_study(write_study(tmp_path, search={**search, "trials": 5}, seeds=[4, 5]))
    assert [cell.label for cell in searched_cells(more, plan_cells(more), tmp_path / "out")[1]] == ["FedPer"]


def test_a_process_that_a_killed_search_left_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "trial_0" / "version_0").mkdir(parents=True)
    orphan, starter = RunLock(tmp_path / "trial_0" / "version_0"), Starter()

    def wait(seconds):
        if orphan.is_held:
            assert starter.commands == []
            orphan.release()

    monkeypatch.setattr("time.sleep", wait)
    assert run_trial(CONFIG, tmp_path / "trial_0", starter=starter) == 0.5
    assert not orphan.is_held


def test_the_best_round_is_remembered_when_a_trial_goes_on(tmp_path):
    path = tmp_path / "progress.json"
    for epoch, validation, best in ((0, 0.75, 0.75), (1, 0.5, 0.75), (0, 0.25, 0.25)):
        callback, metrics = ProgressFile(str(path)), {"val_accuracy/mean": validation}
        trainer = SimpleNamespace(current_epoch=epoch, max_epochs=2, callback_metrics=metrics)
        callback.on_train_start(trainer, None)
        callback.on_train_epoch_end(trainer, None)
        assert read_progress(path).best_validation == best


def test_where_data_lie_is_no_other_search_but_another_choice_is(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": {"low": 0.01, "high": 0.1}}}
    calls = []

    def find(asked, config, folder):
        calls.append(asked)
        return {"model.method.lr": 0.07}

    study = read_study(write_study(tmp_path, search=search))
    for words in ((), (("data.init_args.root", "elsewhere"),)):
        searched_cells(study, plan_cells(study, words), tmp_path / "out", find)
        assert len(calls) == 2
    study = read_study(write_study(tmp_path, search=search, choice="validation_selected"))
    assert len(searched_cells(study, plan_cells(study), tmp_path / "out")[1]) == 2
    searched_cells(study, plan_cells(study), tmp_path / "out", find)
    study = read_study(write_study(tmp_path, search=search, choice="best_test"))  # validation chooses for both
    assert searched_cells(study, plan_cells(study), tmp_path / "out")[1] == []


def test_rows_and_seeds_that_are_added_are_no_other_search(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": {"low": 0.01, "high": 0.1}}}

    def waiting(methods, seeds, find=None):
        study = read_study(write_study(tmp_path, search={**search, "methods": methods}, seeds=seeds))
        return [cell.label for cell in searched_cells(study, plan_cells(study), tmp_path / "out", find)[1]]

    assert waiting(["FedAvg"], [1, 2], lambda asked, config, folder: {"model.method.lr": 0.07}) == []
    assert waiting(["FedAvg", "FedPer"], [1, 2]) == ["FedPer"]
    assert waiting(["FedAvg"], [0, 1, 2]) == []
    assert waiting(["FedAvg"], [0, 2]) == ["FedAvg"]  # it was that of seed 1
    (tmp_path / "out" / "search" / "all" / "FedAvg" / "best.yaml").write_text("")
    assert waiting(["FedAvg"], [1, 2]) == ["FedAvg"]


def test_the_name_of_a_search_in_its_folder():
    space = {"model.method.lr": Dimension(choices=(0.1, 0.2))}
    config = {"data": {"init_args": {"root": "data"}}, "trainer": {"max_epochs": 2}}
    name = digest(Search(2, space), config, "last")
    assert name == digest(Search(3, space), with_option(config, "data.init_args.root", "elsewhere"), "last")
    assert name != digest(Search(2, space), with_option(config, "data.init_args.root_of", "x"), "last")
    assert name != digest(Search(2, space), config, "best_test")


def test_a_number_in_quotes_is_searched_once(tmp_path):
    search = {"trials": 1, "space": {"model.method.lr": {"choices": ["1e-3", "1e-2"]}}, "methods": ["FedPer"]}
    study, calls = read_study(write_study(tmp_path, search=search)), []

    def find(asked, config, folder):
        calls.append(asked)
        return {"model.method.lr": "1e-3"}

    for _ in range(2):
        ready, waiting = searched_cells(study, plan_cells(study), tmp_path / "out", find)
    assert (len(calls), len(ready), waiting) == (1, 2, [])
    assert len(list((tmp_path / "out" / "search").rglob("best*.yaml"))) == 1


def test_a_search_without_a_trial_that_succeeded_leaves_its_row_alone(tmp_path):
    study = read_study(
        write_study(tmp_path, search={"trials": 1, "space": {"model.method.lr": {"choices": [0.1, 0.2]}}})
    )

    def find(asked, config, folder):
        if folder.name == "FedAvg":
            raise NoTrialError("no trial of the search succeeded")
        return {"model.method.lr": 0.2}

    ready, waiting = searched_cells(study, plan_cells(study), tmp_path / "out", find)
    assert ([cell.label for cell in ready], [cell.label for cell in waiting]) == (["FedPer"], ["FedAvg"])
