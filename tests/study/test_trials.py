"""Trials of a search, and what it writes down of them."""

import json

import pytest
from _helpers.studies import PretendedStarter

from pfl_lightning.jobs import supervision
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study import run_trial
from pfl_lightning.study.definition.study import Dimension
from pfl_lightning.study.trials import TriedOptions, bound_notes, write_json, write_table

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


@pytest.mark.parametrize(
    ("tried", "value", "end"),
    [
        (Dimension(low=1e-4, high=1.0, log=True), 0.8, "upper"),
        (Dimension(low=1e-4, high=1.0, log=True), 0.1, ""),
        (Dimension(low=1e-4, high=1.0, log=True), 1.3e-4, "lower"),
        (Dimension(low=0.0, high=1.0), 0.5, ""),
        (Dimension(low=0.0, high=1.0), 0.0, "lower"),
        (Dimension(low=1, high=3, integer=True), 2, ""),
        (Dimension(low=1, high=3, integer=True), 3, "upper"),
        (Dimension(choices=(0.1, 1.0, 0.01)), 1.0, "upper"),
        (Dimension(choices=(0.1, 1.0, 0.01)), 0.1, ""),
        (Dimension(choices=(0.1, 1.0, 0.01)), 0.01, "lower"),
        (Dimension(choices=("mlp", ["mlp", "small_cnn"])), "mlp", ""),
        (Dimension(choices=(True, False)), True, ""),
        (Dimension(choices=(None, 0.1)), 0.1, ""),
        (Dimension(choices=(0.1,)), 0.1, ""),
    ],
)
def test_a_chosen_value_at_an_end_of_what_was_tried_is_told(tried, value, end):
    notes = bound_notes({"lr": value}, {"lr": tried})
    assert [f"is at the {end} end of what was tried" in note for note in notes] == [True] * bool(end)


def test_the_table_says_it_below_the_trials(tmp_path):
    space = {"a.lr": Dimension(choices=(0.1, 1.0)), "a.name": Dimension(choices=("x", "y"))}
    rows = [
        TriedOptions(0, "complete", 0.5, {"a.lr": 0.1, "a.name": "x"}, 8),
        TriedOptions(1, "complete", 0.75, {"a.lr": 1.0, "a.name": "y"}, 8),
    ]
    write_table(tmp_path / "search.md", rows[1], rows, space)
    lines = (tmp_path / "search.md").read_text().splitlines()
    assert lines[4:6] == ["| 1 | 1 | y | 75.00 | 8 | chosen |", "| 0 | 0.1 | x | 50.00 | 8 |  |"]
    assert lines[6:] == ["", "- a.lr: 1 is at the upper end of what was tried; values above it may be better."]
    write_json(tmp_path / "search.json", rows[1], rows)
    assert json.loads((tmp_path / "search.json").read_text())["best"]["options"] == {"a.lr": 1.0, "a.name": "y"}
