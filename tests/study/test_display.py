"""What a study shows while it runs."""

import io
import json

import pytest
from _helpers.studies import write_study
from rich.console import Console

from pfl_lightning.errors import FederationError
from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.display import Display
from pfl_lightning.study.timing.estimate import _Watcher
from pfl_lightning.study.timing.times import Times, duration
from pfl_lightning.study.timing.times_file import CellTime


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
        "FedAvg, seed 0 done, test accuracy 75.00 % (1 of 4 done, 1 running, about 3 min left)",
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


def test_a_live_table_on_a_terminal(runs):
    display = displayed(runs, terminal=True)
    table = play(display, runs)
    cells = [list(column.cells) for column in table.columns]
    assert [str(cell) for cell in cells[0]] == ["FedAvg", "FedPer"]
    assert cells[1] == ["0/2", "0/2"]
    assert cells[2] == ["seed 0: round 1/2", "seed 0: round 0/2"]
    assert cells[3] == ["50.00 %", ""]
    last = display.table()
    assert [list(column.cells) for column in last.columns][1] == ["1/2", "0/2, 1 failed"]
    assert "1 of 4 done, 1 failed, about 2 min left" in display.console.file.getvalue()


def test_brackets_in_names_of_a_live_table(tmp_path):
    study = read_study(write_study(tmp_path, methods={"FedAvg [ours]": {}, "FedPer [/b]": {}}))
    display = displayed(plan_runs(study, plan_cells(study), tmp_path / "out"), terminal=True)
    with display:
        pass
    shown = display.console.file.getvalue()
    assert "FedAvg [ours]" in shown
    assert "FedPer [/b]" in shown


@pytest.fixture
def clock(monkeypatch):
    """A pretended clock, in a list."""
    now = [0.0]
    monkeypatch.setattr("pfl_lightning.study.timing.times.time.monotonic", lambda: now[0])
    return now


def test_the_time_left(runs):
    times = Times({str(runs[0].cell.path): CellTime(per_round=10.0, around=5.0)})
    assert times.left(runs[:1], 2) == 25.0
    assert times.left(runs, 2) == 50.0  # the other method counts like the one that is known
    times.rounds[str(runs[0].folder)] = 1
    assert times.left(runs[:1], 1) == 15.0
    assert Times().left(runs, 2) == 0.0
    assert duration(59.9) == "60 s"


def test_times_are_kept(tmp_path):
    times = Times({"all/FedAvg": CellTime(2.0, 1.0), "all/Ditto": CellTime(3.0)}, path=tmp_path / "new" / "times.json")
    times.now = {"all/FedAvg": CellTime(4.0), "all/FedPer": CellTime(5.0, 6.0)}
    times.save()
    loaded = Times.load(times.path)
    assert loaded.before == {
        "all/FedAvg": CellTime(4.0, 1.0),
        "all/Ditto": CellTime(3.0),
        "all/FedPer": CellTime(5.0, 6.0),
    }
    assert loaded.path == times.path
    entries = (
        '{"per_round": null}',
        '{"per_round": "3"}',
        '{"per_round": 1, "around": "x"}',
        '{"per_round": NaN}',
        "{}",
        "3",
    )
    for damaged in ("{", "[]", *(f'{{"all/FedAvg": {entry}}}' for entry in entries)):
        times.path.write_text(damaged)
        assert Times.load(times.path).before == {}


def test_scores_of_nearest_neighbors_are_no_accuracies(runs):
    display = displayed(runs, terminal=False)
    content = {"round": 2, "rounds": 2, "seconds_per_round": 60.0, "test": 0.5, "score": "nearest_neighbor"}
    runs[0].folder.mkdir(parents=True)
    runs[0].progress_file.write_text(json.dumps(content))
    with display:
        display.finished(runs[0])
    assert "done, test nearest-neighbor score 50.00 %" in display.console.file.getvalue()
    assert next(iter(display.table().columns[3].cells)) == "50.00 % (nearest-neighbor score)"


def test_the_time_left_has_what_a_run_takes_around_its_rounds(runs, clock):
    """Starting a process takes longer than a round of a small model."""
    display = displayed(runs, terminal=False)
    display.started(runs[0], resumed=False)
    write_progress(runs[0], 2, 0.75)
    clock[0] = 150.0
    display.finished(runs[0])
    assert display.times.now[str(runs[0].cell.path)] == CellTime(per_round=60.0, around=30.0)
    assert display.times.left(runs[1:2], 1) == 150.0


def test_a_run_that_goes_on_is_timed_by_what_it_plays_now(runs, clock):
    display = displayed(runs, terminal=False)
    write_progress(runs[0], 1, 0.5)
    display.times.learn_all(runs)
    display.started(runs[0], resumed=True)
    clock[0] = 20.0
    display.tick()
    assert display.times.now == {}  # an earlier process has said it
    assert display.times.left(runs[:1], 1) == 60.0
    write_progress(runs[0], 2, 0.75)
    clock[0] = 100.0
    display.finished(runs[0])
    assert display.times.now[str(runs[0].cell.path)] == CellTime(per_round=60.0, around=40.0)


def test_of_a_run_that_is_being_played_what_is_gone_does_not_count(runs, clock):
    times = Times({str(runs[0].cell.path): CellTime(per_round=10.0, around=30.0)})
    times.start(runs[0], 0)
    clock[0] = 25.0
    assert times.left(runs[:1], 1) == 25.0  # 5 of the start, and two rounds
    clock[0] = 45.0
    assert times.left(runs[:1], 1) == 20.0  # longer than expected: two rounds still


class Machine:
    """Runs of two rounds, two at once, whose processes take some time to start; written down as they would be."""

    def __init__(self, clock, runs, start, per_round):
        self.clock, self.runs, self.start, self.per_round = clock, runs, start, per_round

    def play(self, display, number=None):
        """Play runs one after another on two places; yields the time left and the true one after each end."""
        waiting, busy, ends = list(self.runs[:number]), {}, []
        while waiting or busy:
            while waiting and len(busy) < 2:
                run = waiting.pop(0)
                busy[run.name] = (self.clock[0] + self.start + 2 * self.per_round, run)
                display.started(run, resumed=False)
            name = min(busy, key=lambda one: busy[one][0])
            self.clock[0], run = busy.pop(name)
            run.folder.mkdir(parents=True, exist_ok=True)
            content = {"round": 2, "rounds": 2, "seconds_per_round": self.per_round, "test": 0.5}
            run.progress_file.write_text(json.dumps(content))
            display.finished(run)
            ends.append((self.clock[0], display.times.left([*waiting, *(run for _, run in busy.values())], 2)))
        return [(left, self.clock[0] - now) for now, left in ends]


@pytest.fixture
def many(tmp_path):
    """18 runs, of six methods."""
    methods = {f"FedAvg {number}": {"model": {"method": {"class_path": "FedAvg"}}} for number in range(6)}
    study = read_study(write_study(tmp_path, seeds=[0, 1, 2], methods=methods))
    return plan_runs(study, plan_cells(study), tmp_path / "out")


@pytest.mark.parametrize("kept", [True, False], ids=["times are kept", "nothing is known of starts"])
def test_the_time_left_after_a_resume_on_a_busy_machine(many, clock, tmp_path, kept):
    """13 runs were done while the machine was idle: of 11 s, 10 of them to start. Now all takes three times as long."""
    display = displayed(many, terminal=False)
    display.times = Times.load(tmp_path / "times.json")
    Machine(clock, many[:13], 10.0, 0.5).play(display)
    if not kept:
        (tmp_path / "times.json").unlink()

    display = displayed(many, terminal=False)
    display.times = Times.load(tmp_path / "times.json")
    display.times.learn_all(many)
    clock[0] += 1000.0
    first = display.times.left(many[13:], 2)
    assert first == (27.5 if kept else 2.5)  # by what is known before anything has ended
    found = Machine(clock, many[13:], 30.0, 1.5).play(display)
    assert [true for _, true in found] == [66.0, 66.0, 33.0, 33.0, 0.0]
    for left, true in found[1:]:
        assert left == pytest.approx(true, rel=0.35)


def test_the_reason_of_a_first_round_that_fails_is_told_once(runs, tmp_path):
    watcher = _Watcher(Times())
    with pytest.raises(FederationError) as found:
        watcher.failed(runs[0], 1, "pfl: no image folder at '/nowhere'\n(PFL_DEBUG=1 shows where)", again=False)
    name = runs[0].cell.name
    assert str(found.value) == f"{name} fails in its first round: no image folder at '/nowhere' (log: {runs[0].log})"
