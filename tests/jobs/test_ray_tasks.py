"""Runs as tasks of a Ray cluster: on an emulated one, and (slowly) on a real one."""

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from _helpers.studies import Notes, PretendedProcess, finish, write_study

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs import processes as module
from pfl_lightning.jobs import supervision
from pfl_lightning.jobs.processes import LocalProcess, RayStarter
from pfl_lightning.jobs.supervision import Job
from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.runner import Runner


class Task:
    """What a task of the emulated cluster will return: it is run when somebody looks for it."""

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments
        self.canceled = None


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of five cores."""
    tasks = []

    def init(address, log_to_driver):
        if address == "10.0.0.1:6379":
            raise ConnectionError("nobody answers")

    def remote(**options):
        def make(function):
            def start(*arguments):
                tasks.append(Task(function, arguments))
                return tasks[-1]

            assert options == {"num_cpus": 2, "num_gpus": 0.25, "max_retries": 0}
            return SimpleNamespace(remote=start)

        return make

    def get(task):
        if task.canceled is not None:
            raise RuntimeError("the task was canceled")
        return task.function(*task.arguments)

    def cancel(task, force):
        task.canceled = force

    ray = SimpleNamespace(
        init=init,
        remote=remote,
        get=get,
        cancel=cancel,
        wait=lambda waiting, timeout: (waiting, []),
        cluster_resources=lambda: {"CPU": 5.0},
        tasks=tasks,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def planned(tmp_path):
    study = read_study(write_study(tmp_path))
    return plan_runs(study, plan_cells(study), tmp_path / "out")


def test_runs_are_tasks(tmp_path, cluster, monkeypatch):
    played = []

    def play(command):
        played.append(command)
        finish(command.log.parent)
        process = PretendedProcess(command.log.parent, 0, False)
        process.wait = lambda: 0
        return process

    monkeypatch.setattr(module, "LocalProcess", play)
    monkeypatch.setattr(supervision, "POLL", 0.01)
    starter, notes = RayStarter("auto", threads=2, gpus=0.25), Notes()
    assert starter.cores == 5
    failed = Runner(starter, notes, processes=2, threads=2).play(planned(tmp_path))
    assert failed == {}
    assert [command.threads for command in played] == [2, 2]
    assert played[0].argv[0] == "fit"
    assert ("finished", "FedPer, seed 0") in notes.events


def test_a_task_that_is_lost_has_failed(tmp_path, cluster):
    starter = RayStarter("auto", threads=2, gpus=0.25)
    process = starter(Job(("fit",), tmp_path / "log.txt", 2))
    process.stop()
    assert cluster.tasks[0].canceled is False
    assert process.poll() == 1
    process.kill()
    assert cluster.tasks[0].canceled is True


def test_a_task_that_is_canceled_ends_its_process_at_once(tmp_path, monkeypatch):
    """Ray interrupts it without a signal, from another thread."""
    sleeps = property(lambda self: [sys.executable, "-c", "import time; print(time.sleep(30))"])
    monkeypatch.setattr(Job, "arguments", sleeps)
    process, began = LocalProcess(Job(("fit",), tmp_path / "log.txt")), time.monotonic()
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        process.wait()
    assert process.poll() == -signal.SIGTERM
    assert time.monotonic() - began < 20


def test_no_such_cluster_and_no_ray(cluster, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"--ray 10.0.0.1:6379: there is no such cluster \(nobody answers\)"):
        RayStarter("10.0.0.1:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"--ray needs Ray: pip install"):
        RayStarter("auto")


@pytest.mark.slow
def test_a_study_on_a_real_ray_has_the_table_of_one_in_processes(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    study, tables = write_study(tmp_path, seeds=[0, 1]), []
    for name, words in (("processes", ()), ("ray", ("--ray", "local"))):
        output = tmp_path / name
        command = [sys.executable, "-m", "_helpers.plain_report", "study", str(study), "--output", str(output), *words]
        ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "4 of 4 done" in ended.stdout
        tables.append((output / "table.md").read_text())
    assert tables[0] == tables[1]
    assert [len(row[3]) for row in json.loads(tables[1])[2]] == [2, 2]


@pytest.mark.slow
def test_a_real_ray(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    try:
        notes, runs = Notes(), planned(tmp_path)
        failed = Runner(RayStarter("local"), notes, processes=2).play(runs)
    finally:
        ray.shutdown()
    assert failed == {}, notes.events
    results = json.loads((runs[0].folder / "version_0" / "results.json").read_text())
    assert results["finished"]
