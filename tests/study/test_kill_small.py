"""A study that is killed again and again ends with the table of one that nothing disturbed (minutes)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _helpers.studies import METHODS, write_study

from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.state import RunState, is_in_use, state_of

TESTS = Path(__file__).parents[1]


def start(study, output, *words):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "_helpers.plain_report", "study", str(study), "--output", str(output), *words]
    log = (output.parent / f"{output.name}.txt").open("a")
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log)


def runs_of(study, output):
    found = read_study(study)
    return plan_runs(found, plan_cells(found), output)


def events(output):
    """How often a run was started or went on."""
    log = output.parent / f"{output.name}.txt"
    text = log.read_text() if log.exists() else ""
    return text.count(" started\n") + text.count(" goes on")


def wait_for(condition, process, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)


@pytest.mark.slow
def test_a_study_of_twelve_runs_killed_at_three_random_moments(tmp_path):
    methods = METHODS | {name: {"model": {"method": {"class_path": name}}} for name in ("FedPAC", "LocalOnly")}
    study = write_study(tmp_path, methods=methods, seeds=[0])
    words = ["--trainer.max_epochs", "6"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(study, whole, *words).wait(1800) == 0

    chance = random.Random(time.time_ns())
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before, process = events(killed), start(study, killed, *words)
        wait_for(lambda: events(killed) > before, process)  # noqa: B023
        time.sleep(chance.uniform(0, 25))
        process.send_signal(number)
        assert process.wait(120) == (-number if number == signal.SIGKILL else 128 + number)
    assert start(study, killed, *words).wait(1800) == 0

    assert len(json.loads((whole / "table.md").read_text())[2]) == 4
    said = (killed / "table.md").read_text().replace(str(killed), str(whole))
    assert said == (whole / "table.md").read_text()


@pytest.mark.slow
def test_runs_end_with_a_study_that_is_killed_and_two_studies_share_the_runs(tmp_path):
    study, output = write_study(tmp_path, seeds=[0, 1]), tmp_path / "out"
    words = ["--trainer.max_epochs", "400", "--processes", "1"]
    first, second = start(study, output, *words), start(study, output, *words)
    runs = runs_of(study, output)
    wait_for(lambda: sum(is_in_use(run) for run in runs) == 2, first)
    for process in (first, second):
        process.kill()
        process.wait()
    end = time.monotonic() + 120
    while any(is_in_use(run) for run in runs):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert not any(state_of(run) is RunState.DONE for run in runs)
