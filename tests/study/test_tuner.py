"""The search for options: trials by validation accuracy, resumed, shared and ended early; test parts are left alone.

Trials pretend to be trained, with accuracies that are a function of their options; one test plays real ones.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml
from _helpers.configs import digits_config
from _helpers.studies import finish

pytest.importorskip("optuna")

from pfl_lightning.cli import main
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs import supervision
from pfl_lightning.runs.config import option_of
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study import tuner as module
from pfl_lightning.study.options import with_option
from pfl_lightning.study.reader import Dimension, Search
from pfl_lightning.study.searches import digest
from pfl_lightning.study.tuner import bound_notes, search_options, without_tests

LR, ENCODER = "model.method.init_args.lr", "model.encoder"
SPACE = {LR: Dimension(low=1e-4, high=1.0, log=True), ENCODER: Dimension(choices=("mlp", ["mlp", "small_cnn"]))}


def config_of(tmp_path, **changes):
    return yaml.safe_load(Path(digits_config(tmp_path, {"trainer.max_epochs": 8, **changes})).read_text())


class Process:
    """Evaluates a round at each look, of eight."""

    def __init__(self, folder, accuracy):
        self.folder, self.accuracy, self.round = folder, accuracy, 0

    def poll(self):
        if self.accuracy is None or self.round == 8:
            return 0
        self.round += 1
        progress = {"round": self.round, "rounds": 8, "seconds_per_round": 1.0, "validation": self.accuracy}
        (self.folder / "progress.json").write_text(json.dumps(progress))
        if self.round == 8:
            finish(self.folder)
        return None

    def stop(self):
        self.round = 8

    kill = stop


class Trials:
    """Starts trials that only pretend: best at a learning rate of 0.1 with both encoders."""

    def __init__(self, monkeypatch, interrupt_at=None, fail=False):
        self.played, self.interrupt_at, self.fail = [], interrupt_at, fail
        monkeypatch.setattr(module, "local_starter", lambda threads: self)
        monkeypatch.setattr(supervision, "POLL", 0)
        monkeypatch.setattr(supervision, "AGAIN", 0.01)

    def __call__(self, job):
        folder = job.log.parent
        config = yaml.safe_load((folder / "run.yaml").read_text())
        self.played.append((folder.name, option_of(config, LR), option_of(config, ENCODER)))
        if len(self.played) == self.interrupt_at:
            raise KeyboardInterrupt
        accuracy = 1 - abs(option_of(config, LR) - 0.1) - 0.05 * (option_of(config, ENCODER) == "mlp")
        return Process(folder, None if self.fail else accuracy)


def test_the_best_options_are_found_and_written_down(tmp_path, monkeypatch):
    Trials(monkeypatch)
    best = search_options(Search(20, SPACE, prune=False), config_of(tmp_path), tmp_path / "search")
    assert best[ENCODER] == ["mlp", "small_cnn"]
    assert best[LR] == pytest.approx(0.1, abs=0.06)
    found = json.loads((tmp_path / "search" / "search.json").read_text())
    assert found["best"]["options"] == best
    assert len(found["trials"]) == 20


def test_it_goes_on_after_an_interruption_with_the_trials_that_it_would_have_played(tmp_path, monkeypatch):
    whole = Trials(monkeypatch)
    search, config = Search(6, SPACE, prune=False), config_of(tmp_path)
    best = search_options(search, config, tmp_path / "whole")
    cut = Trials(monkeypatch, interrupt_at=4)
    with pytest.raises(KeyboardInterrupt):
        search_options(search, config, tmp_path / "cut")
    assert search_options(search, config, tmp_path / "cut") == best
    assert cut.played == [*whole.played[:4], *whole.played[3:]]
    search_options(Search(8, SPACE, prune=False), config, tmp_path / "cut")  # more trials are added
    assert len(cut.played) == 9
    assert search_options(search, config, tmp_path / "cut")
    assert len(cut.played) == 9


def test_it_says_what_comes_of_each_trial(tmp_path, monkeypatch):
    Trials(monkeypatch)
    space, config, said = {LR: Dimension(choices=(0.1, 1.0))}, config_of(tmp_path), []
    search_options(Search(12, space), config, tmp_path / "search", log=said.append)
    tried = json.loads((tmp_path / "search" / "search.json").read_text())["trials"]
    for trial, line in zip(tried, said, strict=True):
        outcome = f"ended early after round {trial['rounds']}"
        if trial["state"] == "complete":
            outcome = f"complete after round 8, validation {100 * trial['accuracy']:.2f} %,"
        assert line.startswith(f"trial {trial['number']} {outcome} with lr={trial['options'][LR]:.4g} ")
        assert f"({trial['number'] + 1} of 12 done, best " in line
    assert {"ended early" in line for line in said} == {True, False}
    assert "95.00 % by trial" in said[-1]


def test_trials_below_the_median_are_ended_early(tmp_path, monkeypatch):
    Trials(monkeypatch)
    space = {LR: Dimension(choices=(0.1, 1.0))}
    search_options(Search(12, space), config_of(tmp_path), tmp_path / "search")
    trials = json.loads((tmp_path / "search" / "search.json").read_text())["trials"]
    pruned = [trial for trial in trials if trial["state"] == "pruned"]
    assert pruned
    assert all(trial["options"] == {LR: 1.0} and trial["rounds"] < 8 for trial in pruned)


@pytest.mark.parametrize("changes", [{"data.init_args.validation_share": 0}, {"trainer.max_epochs": 0}])
def test_what_has_no_validation_accuracy_is_refused(tmp_path, changes):
    with pytest.raises(ConfigurationError, match=r"validation_share or trainer\.max_epochs is 0"):
        search_options(Search(2, SPACE), config_of(tmp_path, **changes), tmp_path / "search")


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'pfl-lightning\[search\]'"):
        search_options(Search(2, SPACE), config_of(tmp_path), tmp_path / "search")


def test_a_search_of_which_every_trial_failed_says_so(tmp_path, monkeypatch):
    Trials(monkeypatch, fail=True)
    with pytest.raises(ConfigurationError, match="no trial of the search succeeded"):
        search_options(Search(2, SPACE), config_of(tmp_path), tmp_path / "search")


def test_a_trial_evaluates_no_test_parts_and_does_not_personalize(tmp_path, monkeypatch):
    from pfl_lightning import Federation

    asked = []
    real = Federation.evaluation_task

    def evaluation_task(self, client, *, validation, test):
        asked.append((validation, test))
        return real(self, client, validation=validation, test=test)

    monkeypatch.setattr(Federation, "evaluation_task", evaluation_task)
    monkeypatch.setenv("PFL_DEBUG", "1")
    path = digits_config(tmp_path, {"personalize": {"train": "linear"}})
    config = without_tests(yaml.safe_load(Path(path).read_text()))
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(tmp_path / "trial.yaml")])
    assert asked
    assert set(asked) == {(True, False)}
    [results] = (tmp_path / "runs").glob("*/results.json")
    assert json.loads(results.read_text())["finished"]


@pytest.mark.slow
def test_real_trials(tmp_path):
    """A learning rate that learns against one that does not."""
    search = Search(4, {LR: Dimension(choices=(1e-7, 0.05))}, prune=False)
    config = config_of(tmp_path, **{"trainer.max_epochs": 3, "model.method.init_args.epochs": 3})
    assert search_options(search, config, tmp_path / "search", processes=2) == {LR: 0.05}
    assert not list((tmp_path / "search").rglob("*.ckpt"))


def test_a_search_whose_trials_all_failed_is_repeated(tmp_path, monkeypatch):
    config, search = config_of(tmp_path), Search(2, SPACE)
    Trials(monkeypatch, fail=True)
    with pytest.raises(ConfigurationError, match=r"1/log\.txt\)\nFix the cause and run the same command again"):
        search_options(search, config, tmp_path / "search")
    trials = Trials(monkeypatch)
    assert search_options(search, config, tmp_path / "search")
    assert [name for name, *_ in trials.played] == ["2", "3"]


def test_fewer_trials_choose_among_the_first_of_more(tmp_path, monkeypatch):
    Trials(monkeypatch)
    config, folder = config_of(tmp_path), tmp_path / "search"
    search_options(Search(9, SPACE, prune=False), config, folder)
    tried = json.loads((folder / "search.json").read_text())["trials"]
    few = max(tried[:2], key=lambda trial: trial["accuracy"])
    assert few["accuracy"] < max(trial["accuracy"] for trial in tried)
    assert search_options(Search(2, SPACE, prune=False), config, folder) == few["options"]


def test_the_name_of_a_search_in_its_folder():
    space = {"model.method.lr": Dimension(choices=(0.1, 0.2))}
    config = {"data": {"init_args": {"root": "data"}}, "trainer": {"max_epochs": 2}}
    name = digest(Search(2, space), config, "last")
    assert name == digest(Search(3, space), with_option(config, "data.init_args.root", "elsewhere"), "last")
    assert name == digest(Search(2, space), with_option(config, "personalize.train", "head"), "last")
    assert name != digest(Search(2, space), with_option(config, "data.init_args.root_of", "x"), "last")
    assert name != digest(Search(2, space), config, "best_test")


def test_a_process_that_a_killed_search_left_is_waited_for(tmp_path, monkeypatch):
    trials, folder = Trials(monkeypatch, interrupt_at=1), tmp_path / "search"
    with pytest.raises(KeyboardInterrupt):
        search_options(Search(1, SPACE), config_of(tmp_path), folder)
    version = next(folder.glob("trials_*/0")) / "version_0"
    version.mkdir()
    orphan = RunLock(version)

    def wait(seconds):
        if orphan.is_held:
            assert len(trials.played) == 1
            orphan.release()

    monkeypatch.setattr("time.sleep", wait)
    assert search_options(Search(1, SPACE), config_of(tmp_path), folder)
    assert [name for name, *_ in trials.played] == ["0", "0"]


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


def test_the_file_of_the_trials_says_it(tmp_path, monkeypatch):
    Trials(monkeypatch)
    search_options(
        Search(3, {LR: Dimension(choices=(0.1, 1.0))}, prune=False), config_of(tmp_path), tmp_path / "search"
    )
    [note] = json.loads((tmp_path / "search" / "search.json").read_text())["notes"]
    assert (
        note
        == f"{LR}: 0.1 is at the lower end of what was tried; values below it may be better: extend its search space."
    )
