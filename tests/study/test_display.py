"""What a study shows while it runs."""

import io
import json

import pytest
from _helpers.studies import write_study
from rich.console import Console

from pfl_lightning.study.display import Display
from pfl_lightning.study.plan import plan_cells, plan_runs
from pfl_lightning.study.reader import read_study


@pytest.fixture
def runs(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0, 1]))
    return plan_runs(study, plan_cells(study), tmp_path / "out")


@pytest.fixture
def clock(monkeypatch):
    """A pretended clock, in a list."""
    now = [0.0]
    monkeypatch.setattr("pfl_lightning.study.display.time.monotonic", lambda: now[0])
    return now


def displayed(runs):
    return Display(runs, set(), Console(file=io.StringIO(), width=100, color_system=None, soft_wrap=True))


def write_progress(run, round, test):
    run.folder.mkdir(parents=True, exist_ok=True)
    content = {"round": round, "rounds": 2, "seconds_per_round": 60.0, "test": test}
    run.progress_file.write_text(json.dumps(content))


def play(display, runs, clock):
    display.started(runs[0], resumed=False)
    clock[0] += 20.0
    write_progress(runs[0], 1, 0.5)
    display.tick()
    display.started(runs[1], resumed=False)
    clock[0] += 20.0
    write_progress(runs[0], 2, 0.75)
    display.finished(runs[0])
    display.failed(runs[1], -9, "its last words", again=False)


def test_a_line_for_each_event(runs, clock):
    display = displayed(runs)
    play(display, runs, clock)
    lines = [line[9:] for line in display.console.file.getvalue().splitlines()]
    assert lines[:3] == [
        "FedAvg, seed 0 started",
        "FedPer, seed 0 started",
        "FedAvg, seed 0 done, test accuracy 75.00 % (1 of 4 done, 1 running, about 0:02:00 left)",
    ]
    assert "FedPer, seed 0 ended by SIGKILL, perhaps out of memory: its last words" in lines[3]


def test_a_line_a_minute_on_what_runs(runs, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("pfl_lightning.study.display.time.monotonic", lambda: now[0])
    display = displayed(runs)
    display.started(runs[0], resumed=False)
    display.started(runs[1], resumed=False)
    for seconds, round in ((30, 0), (31, 1), (30, 2), (31, 2)):  # a line after 61 and after 122 seconds
        now[0] += seconds
        if round:
            write_progress(runs[0], round, 0.5)
        display.tick()
    lines = [line[9:] for line in display.console.file.getvalue().splitlines()]
    assert len(lines) == 4
    where = "FedAvg, seed 0: round 1/2, test accuracy 50.00 %; FedPer, seed 0: round 0/2"
    assert lines[2].startswith(f"{where} (0 of 4 done")
    assert lines[3].startswith("FedAvg, seed 0: round 2/2")


def test_names_may_have_brackets_which_are_no_markup(tmp_path, clock):
    study = read_study(write_study(tmp_path, methods={"FedAvg [ours]": {}, "FedPer [/b]": {}}))
    runs = plan_runs(study, plan_cells(study), tmp_path / "out")
    display = displayed(runs)
    for run in runs:
        display.started(run, resumed=False)
    clock[0] = 60.0
    write_progress(runs[0], 1, 0.5)
    display.tick()
    below = "FedAvg [ours], seed 0: round 1/2, test accuracy 50.00 %; FedPer [/b], seed 0: round 0/2"
    assert f"{below} (0 of 2 done, 2 running, about 0:03:00 left)" in display.console.file.getvalue()


def left(display):
    """The end of the summary."""
    return display.summary().partition(", about ")[2]


def test_the_time_left_is_by_the_rate_of_rounds(runs, clock):
    """Four runs of two rounds, two at once: rounds of both count together."""
    display = displayed(runs)
    assert left(display) == ""  # nothing is known
    display.started(runs[0], resumed=False)
    display.started(runs[1], resumed=False)
    clock[0] = 60.0
    assert left(display) == ""
    write_progress(runs[0], 1, 0.5)
    display.tick()
    assert left(display) == "0:07:00 left"
    write_progress(runs[1], 2, 0.5)
    clock[0] = 90.0
    display.finished(runs[1])
    assert left(display) == "0:02:30 left"


def test_rounds_of_earlier_calls_do_not_count_for_the_rate(runs, clock):
    write_progress(runs[0], 1, 0.5)
    display = displayed(runs)
    display.started(runs[0], resumed=True)
    clock[0] = 20.0
    display.tick()
    assert left(display) == ""
    write_progress(runs[0], 2, 0.5)
    display.finished(runs[0])
    assert left(display) == "0:02:00 left"


def test_scores_of_nearest_neighbors_are_no_accuracies(runs):
    display = displayed(runs)
    content = {"round": 2, "rounds": 2, "seconds_per_round": 60.0, "test": 0.5, "score": "nearest_neighbor"}
    runs[0].folder.mkdir(parents=True)
    runs[0].progress_file.write_text(json.dumps(content))
    display.finished(runs[0])
    assert "done, test nearest-neighbor score 50.00 %" in display.console.file.getvalue()
