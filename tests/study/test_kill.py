"""A study that is killed again and again ends with the table of one that nothing disturbed.

Its runs pretend to train; in the slow tests, of minutes, they do.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _helpers.pretended_study import after_a_round
from _helpers.studies import METHODS, write_study

from pfl_lightning.study.plan import plan_cells, plan_runs
from pfl_lightning.study.reader import read_study
from pfl_lightning.study.runner import RunState, claim, state_of

TESTS = Path(__file__).parents[1]
FOUR = METHODS | {name: {"model": {"method": {"class_path": name}}} for name in ("FedPAC", "LocalOnly")}
PRETENDED, REAL = "_helpers.pretended_study", "_helpers.plain_report"


def is_in_use(run):
    """Whether another process has it."""
    lock = claim(run)
    if lock is not None:
        lock.release()
    return lock is None


def start(module, study, output, *words):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", module, "study", str(study), "--output", str(output), "--processes", "2", *words]
    with (output.parent / f"{output.name}.txt").open("a") as log:
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def events(output):
    """How often a run was started or went on."""
    log = output.parent / f"{output.name}.txt"
    text = log.read_text() if log.exists() else ""
    return text.count(" started\n") + text.count(" resumes")


def runs_of(study, output):
    found = read_study(study)
    return plan_runs(found, plan_cells(found), output)


def played(state, rounds):
    """What rounds of a run that pretends to train make of its state."""
    for _ in range(rounds):
        state = after_a_round(state)
    return state


def wait_for(condition, *processes):
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def kill_and_finish(module, study, output, longest, *words):
    """Kill a study at three random moments, and let it end."""
    chance = random.Random(time.time_ns())
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before, process = events(output), start(module, study, output, *words)
        wait_for(lambda: events(output) > before or process.poll() is not None)  # noqa: B023
        time.sleep(chance.uniform(0, longest))
        process.send_signal(number)
        code = -number if number == signal.SIGKILL else 128 + number
        assert process.wait(120) in (code, 0)  # 0: all was done before
    assert start(module, study, output, *words).wait(1800) == 0


def test_a_study_killed_at_three_random_moments(tmp_path):
    """Its runs end with the numbers that their rounds give in this process."""
    output = tmp_path / "killed"
    kill_and_finish(PRETENDED, write_study(tmp_path, seeds=[0, 1]), output, 0.8, "--trainer.max_epochs", "12")
    rows = json.loads((output / "table.md").read_text())[2]
    states = [[run["state"] for run in row[3]] for row in rows]
    assert states == [[[12, played(seed, 12)] for seed in (0, 1)]] * 2


@pytest.mark.slow
def test_a_study_of_twelve_real_runs_killed_at_three_random_moments(tmp_path):
    study, words = write_study(tmp_path, methods=FOUR, seeds=[0, 1, 2]), ("--trainer.max_epochs", "6")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(REAL, study, whole, *words).wait(1800) == 0  # two studies at once would fill a machine of two cores
    kill_and_finish(REAL, study, killed, 25.0, *words)
    assert len(json.loads((whole / "table.md").read_text())[2]) == 4
    said = (killed / "table.md").read_text().replace(str(killed), str(whole))
    assert said == (whole / "table.md").read_text()


@pytest.mark.slow
def test_a_run_that_the_system_kills_is_tried_again(tmp_path):
    """As it does where memory runs out."""
    study, output = write_study(tmp_path, methods={"FedAvg": METHODS["FedAvg"]}), tmp_path / "out"
    process = start(PRETENDED, study, output, "--trainer.max_epochs", "60", "--retry", "1")
    last = output / "runs" / "all" / "FedAvg" / "seed_0" / "version_0" / "checkpoints" / "last.ckpt"
    wait_for(last.exists, process)
    os.kill(int((last.parents[1] / ".lock").read_text().split()[1]), signal.SIGKILL)
    assert process.wait(120) == 0
    said = (tmp_path / "out.txt").read_text()
    assert "FedAvg, seed 0 ended by SIGKILL, perhaps out of memory. It is tried again" in said
    assert "FedAvg, seed 0 resumes" in said
    assert json.loads((output / "table.md").read_text())[2][0][3][0]["state"] == [60, played(0, 60)]


@pytest.mark.parametrize("module", [PRETENDED, pytest.param(REAL, marks=pytest.mark.slow)])
def test_two_studies_share_the_runs_which_end_with_them(tmp_path, module):
    study, output = write_study(tmp_path, seeds=[0, 1, 2]), tmp_path / "out"
    words = ["--trainer.max_epochs", "3000", "--processes", "1"]
    studies = [start(module, study, output, *words) for _ in range(2)]
    runs = runs_of(study, output)
    wait_for(lambda: len(list(output.rglob("version_0/.lock"))) == 2, *studies)
    for process in studies:
        process.kill()
        process.wait()
    wait_for(lambda: not any(is_in_use(run) for run in runs))
    assert not any(state_of(run) is RunState.DONE for run in runs)
    assert events(output) == 2


def test_a_stopped_study_goes_on(tmp_path):
    study, output = write_study(tmp_path), tmp_path / "out"
    process = start(PRETENDED, study, output, "--trainer.max_epochs", "3000")
    wait_for(lambda: len(list(output.rglob("version_0/.lock"))) == 2, process)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    said = (tmp_path / "out.txt").read_text()
    assert f"stopped by SIGTERM. Resume with:\npfl study {study} --output {output} --processes 2 --trainer" in said
    assert not any(is_in_use(run) for run in runs_of(study, output))
