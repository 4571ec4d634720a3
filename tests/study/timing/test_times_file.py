"""Calls on one study keep each other's times."""

import subprocess
import sys
import threading
import time

from _helpers.studies import write_study

from pfl_lightning.state.run_lock import RunLock
from pfl_lightning.study import plan_cells, read_study
from pfl_lightning.study.timing.times import Times
from pfl_lightning.study.timing.times_file import CellTime, read_times, update_times

WRITER = """
import sys
from pathlib import Path
from pfl_lightning.study.timing.times import CellTime, Times
path, name = Path(sys.argv[1]), sys.argv[2]
times = Times.load(path)
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    times.now[f"{name}/{number}"] = CellTime(1.0, float(number))
    times.save()
"""


def test_two_calls_keep_the_times_of_both(tmp_path):
    path = tmp_path / "out" / "times.json"
    first, second = Times.load(path), Times.load(path)
    first.now = {"all/FedAvg": CellTime(1.0, 2.0)}
    second.now = {"all/FedPer": CellTime(3.0)}
    first.save()
    second.save()
    assert read_times(path) == {"all/FedAvg": CellTime(1.0, 2.0), "all/FedPer": CellTime(3.0)}


def test_what_this_call_has_not_measured_stays_as_another_has_just_written_it(tmp_path):
    path = tmp_path / "times.json"
    update_times(path, {"all/FedAvg": CellTime(1.0, 2.0), "all/FedPer": CellTime(1.0)}, {})
    times = Times.load(path)
    update_times(path, {"all/FedAvg": CellTime(9.0, 8.0), "all/FedPer": CellTime(6.0, 7.0)}, {})
    times.now = {"all/FedPer": CellTime(5.0)}
    times.save()
    assert read_times(path) == {"all/FedAvg": CellTime(9.0, 8.0), "all/FedPer": CellTime(5.0, 7.0)}


def test_rounds_that_were_timed_are_kept(tmp_path):
    study = read_study(write_study(tmp_path))
    cell = plan_cells(study)[0]
    path = tmp_path / "times.json"
    update_times(path, {str(cell.path): CellTime(1.0, 2.0)}, {})
    times = Times.load(path)
    times.probed(cell, CellTime(3.0, 4.0))
    times.save()
    assert times.before == read_times(path) == {str(cell.path): CellTime(3.0, 4.0)}


def test_times_are_read_and_replaced_under_a_lock(tmp_path):
    """Without it, the second of two that read at once would drop what the first has written."""
    path = tmp_path / "times.json"
    lock = RunLock(tmp_path)
    writer = threading.Thread(target=update_times, args=(path, {"all/FedAvg": CellTime(1.0)}, {}))
    writer.start()
    time.sleep(0.2)
    assert not path.exists()
    lock.release()
    writer.join(30)
    assert set(read_times(path)) == {"all/FedAvg"}
    assert [found.name for found in tmp_path.iterdir()] == ["times.json"]


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "times.json"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("a", "b", "c")
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    expected = {f"{name}/{number}": CellTime(1.0, float(number)) for name in "abc" for number in range(20)}
    assert read_times(path) == expected


def test_a_folder_that_cannot_be_written_is_left_to_others(tmp_path):
    path = tmp_path / "file" / "times.json"
    (tmp_path / "file").write_text("")
    update_times(path, {"all/FedAvg": CellTime(1.0)}, {})
    assert read_times(path) == {}
