"""What a study shows while it runs."""

import io
import json

import pytest
from _helpers.studies import write_study
from rich.console import Console

from pfl_lightning.errors import FederationError
from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.display import Display
from pfl_lightning.study.estimate import _Watcher
from pfl_lightning.study.times import CellTime, Times, duration


@pytest.fixture
def runs(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0, 1]))
    return plan_runs(study, plan_cells(study), tmp_path / "out")


def displayed(runs, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    return Display(runs, set(), Times(), 2, console)


def write_progress(run, round, test):
    run.folder.mkdir(parents=True, exist_ok=True)
    content = {"round": round, "rounds": 2, "seconds_per_round": 60.0, "test": test}
    run.progress_file.write_text(json.dumps(content))


def play(display, runs):
    with display:
        display.started(runs[0], resumed=False)
        write_progress(runs[0], 1, 0.5)
        display.tick()
        display.started(runs[1], resumed=False)
        table = display.table()
        write_progress(runs[0], 2, 0.75)
        display.finished(runs[0])
        display.failed(runs[1], -9, "its last words", again=False)
    return table


def test_a_line_for_each_event_where_there_is_no_terminal(runs):
    display = displayed(runs, terminal=False)
    play(display, runs)
    lines = [line[9:] for line in display.console.file.getvalue().splitlines()]
    assert lines[:3] == [
        "FedAvg, seed 0 started",
        "FedPer, seed 0 started",
        "FedAvg, seed 0 done, accuracy 75.00 % (1 of 4 done, 1 running, about 3 min left)",
    ]
    assert "FedPer, seed 0 ended by SIGKILL, perhaps for want of memory: its last words" in lines[3]


def test_a_live_table_on_a_terminal(runs):
    display = displayed(runs, terminal=True)
    table = play(display, runs)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["FedAvg", "FedPer"]
    assert cells[1] == ["0/2", "0/2"]
    assert cells[2] == ["seed 0: round 1/2", "seed 0: round 0/2"]
    assert cells[3] == ["50.00 %", ""]
    last = display.table()
    assert [list(column.cells) for column in last.columns][1] == ["1/2", "0/2, 1 failed"]
    assert "1 of 4 done, 1 failed, about 2 min left" in display.console.file.getvalue()


def test_the_time_left(runs):
    times = Times({str(runs[0].cell.path): CellTime(per_round=10.0, around=5.0)})
    assert times.left(runs[:1], 2) == 25.0
    assert times.left(runs, 2) == 50.0  # the other method counts like the one that is known
    times.rounds[str(runs[0].folder)] = 1
    assert times.left(runs[:1], 1) == 15.0
    assert Times().left(runs, 2) == 0.0
    assert duration(59.9) == "60 s"


def test_times_are_kept(tmp_path):
    times = Times({"all/FedAvg": CellTime(2.0, 1.0)})
    times.save(tmp_path / "times.json")
    assert Times.load(tmp_path / "times.json").cells == times.cells
    (tmp_path / "times.json").write_text("{")
    assert Times.load(tmp_path / "times.json").cells == {}


def test_scores_of_nearest_neighbors_are_no_accuracies(runs):
    display = displayed(runs, terminal=False)
    content = {"round": 2, "rounds": 2, "seconds_per_round": 60.0, "test": 0.5, "score": "nearest_neighbor"}
    runs[0].folder.mkdir(parents=True)
    runs[0].progress_file.write_text(json.dumps(content))
    with display:
        display.finished(runs[0])
    assert "done, nearest-neighbor score 50.00 %" in display.console.file.getvalue()
    assert next(iter(display.table().columns[3].cells)) == "50.00 % (nearest-neighbor score)"


def test_the_time_left_has_what_a_run_takes_around_its_rounds(runs, monkeypatch):
    """Starting a process takes longer than a round of a small model."""
    clock = [0.0]
    monkeypatch.setattr("pfl_lightning.study.display.time.monotonic", lambda: clock[0])
    display = displayed(runs, terminal=False)
    display.started(runs[0], resumed=False)
    write_progress(runs[0], 2, 0.75)
    clock[0] = 150.0
    display.finished(runs[0])
    assert display.times.cells[str(runs[0].cell.path)] == CellTime(per_round=60.0, around=30.0)
    display.started(runs[1], resumed=True)
    write_progress(runs[1], 2, 0.75)
    display.finished(runs[1])  # what it played before is not known
    assert display.times.cells[str(runs[1].cell.path)].around == 0.0


def test_the_reason_of_a_first_round_that_fails_is_told_once(runs, tmp_path):
    watcher = _Watcher(Times(), tmp_path / "times.json")
    with pytest.raises(FederationError) as found:
        watcher.failed(runs[0], 1, "pfl: no image folder at '/nowhere'\n(PFL_DEBUG=1 shows where)", again=False)
    name = runs[0].cell.name
    assert str(found.value) == f"{name} fails in its first round: no image folder at '/nowhere' (log: {runs[0].log})"
