"""How the runs of a study are run: several at once, after failures, beside other studies, and stopped."""

import os
import signal
from dataclasses import replace

import lightning as L
import pytest
from _helpers.studies import Notes, PretendedStarter, finish, write_study
from jsonargparse import ArgumentParser

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs import supervision
from pfl_lightning.jobs.supervision import StoppedError
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.options import with_option, write_yaml
from pfl_lightning.study.plan import plan_cells, plan_runs
from pfl_lightning.study.reader import read_study
from pfl_lightning.study.runner import Runner, RunState, changed_options, run_job, state_of


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(supervision, "POLL", 0.01)
    monkeypatch.setattr(supervision, "AGAIN", 0.02)


@pytest.fixture
def runs(tmp_path):
    """Four runs: two methods, two seeds."""
    study = read_study(write_study(tmp_path, seeds=[0, 1]))
    return plan_runs(study, plan_cells(study), tmp_path / "out")


def test_all_runs_are_run_two_at_a_time_the_first_seeds_first(runs):
    starter, notes = PretendedStarter(), Notes()
    failed = Runner(starter, notes, processes=2).run(runs)
    assert failed == {}
    assert [name for event, name in notes.events if event == "started"] == [
        *("FedAvg, seed 0", "FedPer, seed 0", "FedAvg, seed 1", "FedPer, seed 1")
    ]
    assert starter.most == 2
    assert all(state_of(run) is RunState.DONE for run in runs)
    assert not list(runs[0].folder.glob(".lock"))


def test_a_run_that_fails_does_not_end_the_others(runs):
    notes = Notes()
    failed = Runner(PretendedStarter({"FedAvg": [1, 1]}), notes).run(runs)
    assert list(failed) == ["FedAvg, seed 0", "FedAvg, seed 1"]
    assert ("failed", "FedAvg, seed 0", "pfl: exit 1 was asked for") in notes.events
    assert ("finished", "FedPer, seed 1") in notes.events


def test_a_run_that_fails_is_tried_again(runs):
    notes = Notes()
    failed = Runner(PretendedStarter({"FedAvg": [1, 3]}), notes, retry=2).run(runs[:1])
    assert failed == {}
    assert [event[0] for event in notes.events] == ["started", "again", "started", "again", "started", "finished"]


def test_a_run_whose_options_are_refused_is_not_tried_again(runs):
    notes = Notes()
    failed = Runner(PretendedStarter({"FedAvg": [2, 0]}), notes, retry=2).run(runs[:1])
    assert list(failed) == ["FedAvg, seed 0"]
    assert [event[0] for event in notes.events] == ["started", "failed"]


def test_a_process_that_ends_well_without_results_has_failed(runs, monkeypatch):
    monkeypatch.setattr("_helpers.studies.finish", lambda folder: None)
    failed = Runner(PretendedStarter(), Notes()).run(runs[:1])
    assert list(failed) == ["FedAvg, seed 0"]


def test_a_run_goes_on_from_its_checkpoint_or_starts_over_where_there_is_none(runs):
    begun, broken = runs[:2]
    for run in (begun, broken):
        (run.folder / "version_0" / "checkpoints").mkdir(parents=True)
    last = begun.folder / "version_0" / "checkpoints" / "last.ckpt"
    last.touch()
    starter, notes = PretendedStarter(), Notes()
    Runner(starter, notes).run([begun, broken])
    assert starter.commands[0][-2:] == ("--ckpt_path", str(last))
    assert "--ckpt_path" not in starter.commands[1]
    assert (broken.folder / "set_aside_0" / "checkpoints").is_dir()
    assert [event for event, _ in notes.events] == ["resumed", "finished", "started", "finished"]


def test_runs_of_another_study_are_left_to_it(runs):
    runs[0].folder.mkdir(parents=True)
    other, notes = RunLock(runs[0].folder), Notes()

    def when_alone():
        if ("elsewhere", runs[0].name) in notes.events and other.is_held:
            finish(runs[0].folder)
            other.release()

    notes.at_tick, starter = when_alone, PretendedStarter()
    Runner(starter, notes).run(runs[:2])
    assert len(starter.commands) == 1
    assert ("finished", runs[0].name) in notes.events
    assert ("started", runs[0].name) not in notes.events


def test_a_process_that_a_killed_study_left_is_waited_for(runs):
    version = runs[0].folder / "version_0"
    version.mkdir(parents=True)
    orphan, notes = RunLock(version), Notes()
    notes.at_tick = lambda: ("elsewhere", runs[0].name) in notes.events and orphan.release()
    Runner(PretendedStarter(), notes).run(runs[:1])
    assert [event for event, _ in notes.events if event != "elsewhere"] == ["started", "finished"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_processes(runs, number, monkeypatch):
    before = signal.signal(number, signal.default_int_handler)
    notes, starter = Notes(), PretendedStarter(endless=True)
    notes.at_tick = lambda: os.kill(os.getpid(), number)
    try:
        with pytest.raises(StoppedError) as stopped:
            Runner(starter, notes, processes=2).run(runs)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert stopped.value.number is number
    assert [process.stopped for process in starter.processes] == [True, True]
    assert {event[0] for event in notes.events} == {"started"}


def test_processes_that_do_not_end_are_killed(runs, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE", 0.05)
    monkeypatch.setattr("_helpers.studies.PretendedProcess.stop", lambda process: None)
    notes, starter = Notes(), PretendedStarter(endless=True)

    def stop():
        raise RuntimeError

    notes.at_tick = stop
    with pytest.raises(RuntimeError):
        Runner(starter, notes).run(runs)
    assert starter.processes[0].killed


def test_changed_options_are_those_that_matter(runs):
    run = runs[0]
    Runner(PretendedStarter(), Notes()).run([run])
    assert state_of(replace(run, config=with_option(run.config, "data.root", "/elsewhere"))) is RunState.DONE
    changed = replace(run, config=with_option(run.config, "trainer.max_epochs", 5))
    assert state_of(changed) is RunState.CHANGED
    assert list(map(str, changed_options(changed))) == ["trainer.max_epochs: 2 -> 5"]
    null = replace(run, config=with_option(run.config, "model.method.head_lr", None))  # which need not be the default
    assert list(map(str, changed_options(null))) == ['model.method.init_args.head_lr: "not given" -> null']


def test_one_client_is_not_all_clients(runs):
    run = replace(runs[0], config=with_option(runs[0].config, "loop.cohort", 1.0))
    Runner(PretendedStarter(), Notes()).run([run])
    assert state_of(run) is RunState.DONE
    assert state_of(replace(run, config=with_option(run.config, "loop.cohort", 1))) is RunState.CHANGED


def test_a_text_that_yaml_reads_as_a_number_is_no_change(runs):
    for value in ("1e5", float("nan")):
        run = replace(runs[0], config=with_option(runs[0].config, "model.method.lr", value))
        write_yaml(run.config_file, run.config)
        assert changed_options(run) == []


def test_a_run_that_personalizes_is_done_when_it_has(runs):
    run = replace(runs[0], config={**runs[0].config, "personalize": {"train": "linear"}})
    finish(run.folder)
    assert state_of(run) is RunState.UNFINISHED
    (run.folder / "version_0" / "personalized.json").write_text("{}")
    assert state_of(run) is RunState.DONE
    finish(run.folder, finished=False)
    assert state_of(run) is RunState.UNFINISHED


def test_a_run_that_another_command_made_with_other_options_is_not_gone_on_with(runs):
    """It is made between the plan of this command and its start."""
    other = replace(runs[0], config=with_option(runs[0].config, "trainer.max_epochs", 5))
    Runner(PretendedStarter(), Notes()).run([other])
    starter = PretendedStarter()
    with pytest.raises(ConfigurationError, match=r"FedAvg, seed 0 was made meanwhile by .*trainer\.max_epochs"):
        Runner(starter, Notes()).run(runs[:1])
    assert starter.commands == []
    RunLock(runs[0].folder).release()  # the lock is free


def test_the_command_of_a_run_has_its_folder_whatever_its_name(tmp_path):
    study = read_study(write_study(tmp_path))
    for name in ("one: two", "{1} #, [x]"):
        run = plan_runs(study, plan_cells(study), tmp_path / name)[0]
        words = [word for word in run_job(run).argv if "callbacks" in word]
        parser = ArgumentParser()  # as that of the command line
        parser.add_argument("--trainer.callbacks", type=list[L.Callback])
        assert parser.parse_args(words).trainer.callbacks[0].init_args.path == str(run.progress_file)
