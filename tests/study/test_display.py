"""What a study shows while it runs."""

import io
import json
import re

import pytest
from _helpers.studies import write_study
from rich.console import Console

from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.display import Display, Rate, duration


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


def displayed(runs, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    return Display(runs, set(), Rate(runs), console)


def write_progress(run, round, test):
    run.folder.mkdir(parents=True, exist_ok=True)
    content = {"round": round, "rounds": 2, "seconds_per_round": 60.0, "test": test}
    run.progress_file.write_text(json.dumps(content))


def play(display, runs, clock):
    with display:
        display.started(runs[0], resumed=False)
        clock[0] += 20.0
        write_progress(runs[0], 1, 0.5)
        display.tick()
        display.started(runs[1], resumed=False)
        clock[0] += 20.0
        write_progress(runs[0], 2, 0.75)
        display.finished(runs[0])
        display.failed(runs[1], -9, "its last words", again=False)


def test_a_line_for_each_event_where_there_is_no_terminal(runs, clock):
    display = displayed(runs, terminal=False)
    play(display, runs, clock)
    lines = [line[9:] for line in display.console.file.getvalue().splitlines()]
    assert lines[:3] == [
        "FedAvg, seed 0 started",
        "FedPer, seed 0 started",
        "FedAvg, seed 0 done, test accuracy 75.00 % (1 of 4 done, 1 running, about 2 min left)",
    ]
    assert "FedPer, seed 0 ended by SIGKILL, perhaps for want of memory: its last words" in lines[3]


def test_a_line_a_minute_on_what_runs_where_there_is_no_terminal(runs, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("pfl_lightning.study.display.time.monotonic", lambda: now[0])
    display = displayed(runs, terminal=False)
    display.console.soft_wrap = True
    with display:
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


def test_bars_on_a_terminal(runs, clock):
    display = displayed(runs, terminal=True)
    play(display, runs, clock)
    shown = display.console.file.getvalue()
    assert re.search(r"FedAvg, seed 0 .* round 1/2, test accuracy 50.00 %", shown)
    assert re.search(r"runs .* 1 of 4 done, 1 failed, about 80 s left", shown)


def test_brackets_in_names_on_a_terminal(tmp_path):
    study = read_study(write_study(tmp_path, methods={"FedAvg [ours]": {}, "FedPer [/b]": {}}))
    runs = plan_runs(study, plan_cells(study), tmp_path / "out")
    display = displayed(runs, terminal=True)
    with display:
        for run in runs:
            display.started(run, resumed=False)
    bars = [line for line in display.console.file.getvalue().splitlines() if "round 0/2" in line]
    assert any("FedAvg [ours], seed 0" in line for line in bars)
    assert any("FedPer [/b], seed 0" in line for line in bars)


def test_the_time_left_is_by_the_rate_of_rounds(runs, clock):
    """Four runs of two rounds, two at once: rounds of both count together."""
    rate = Rate(runs)
    assert rate.left(runs) == 0.0  # nothing is known
    rate.start(runs[0], 0)
    rate.start(runs[1], 0)
    clock[0] = 30.0
    assert rate.left(runs) == 0.0
    rate.learn(runs[0], 1)
    assert rate.left(runs) == 7 * 30.0
    rate.learn(runs[1], 2)
    clock[0] = 60.0
    assert rate.left([runs[0], *runs[2:]]) == 5 * 60.0 / 3
    assert duration(59.9) == "60 s"


def test_rounds_of_earlier_calls_do_not_count_for_the_rate(runs, clock):
    write_progress(runs[0], 1, 0.5)
    rate = Rate(runs)
    rate.start(runs[0], 1)
    clock[0] = 20.0
    rate.learn(runs[0], 1)
    assert rate.left(runs) == 0.0
    rate.learn(runs[0], 2)
    assert rate.left(runs[1:2]) == 2 * 20.0


def test_runs_that_others_train_for_take_no_rounds(runs, clock):
    rate = Rate(runs, repeated=[runs[1]])
    rate.start(runs[0], 0)
    clock[0] = 10.0
    rate.learn(runs[0], 1)
    assert rate.left(runs[:2]) == 10.0


def test_scores_of_nearest_neighbors_are_no_accuracies(runs):
    display = displayed(runs, terminal=False)
    content = {"round": 2, "rounds": 2, "seconds_per_round": 60.0, "test": 0.5, "score": "nearest_neighbor"}
    runs[0].folder.mkdir(parents=True)
    runs[0].progress_file.write_text(json.dumps(content))
    with display:
        display.finished(runs[0])
    assert "done, test nearest-neighbor score 50.00 %" in display.console.file.getvalue()
