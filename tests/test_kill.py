"""A process that is really killed in the middle of a round, and the command that goes on with it.

The tests take over 10 s: the run that is killed is a process of its own, which imports torch.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _helpers.results import without_seconds
from _helpers.slurm import enter_job

from pfl_lightning.cli import main

ROOT = Path(__file__).parent.parent


def arguments(run_dir):
    options = {
        "config": ROOT / "configs" / "fedpac_digits.yaml",
        "run_dir": run_dir,
        "model.encoder": "mlp",
        "model.method.init_args.epochs": 1,
        "data.init_args.partition.init_args.num_clients": 5,
        "data.init_args.partition.init_args.samples_per_client": 30,
        "loop.cohort": 3,
        "trainer.max_epochs": 4,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    return ["fit", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]


def start(arguments):
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "pfl_lightning.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def content(run_dir):
    version = run_dir / "version_0"
    state = torch.load(version / "checkpoints" / "last.ckpt", weights_only=True)
    results = without_seconds(json.loads((version / "results.json").read_text()))
    return state, results, (version / "clients.csv").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    main(arguments(folder))
    return content(folder)


def test_killed_in_the_middle_of_a_round_and_resumed(tmp_path, whole):
    kill = [
        "--trainer.callbacks+=_helpers.kill.KillInRound",
        "--trainer.callbacks.round=2",
        "--trainer.callbacks.batch=1",
    ]
    killed = start([*arguments(tmp_path / "killed"), *kill])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    left = tmp_path / "killed" / "version_0"
    assert torch.load(left / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 1
    assert not (left / "results.json").exists()

    main([*arguments(tmp_path / "killed"), "--ckpt_path", "last"])
    assert_same(content(tmp_path / "killed"), whole)


@pytest.mark.slow
def test_preempted_in_the_middle_of_a_round_and_started_again(tmp_path, whole, monkeypatch):
    """A job of SLURM: its signal, ``scontrol requeue``, SIGTERM, and the same command once more."""
    signal_in_round = [
        "--trainer.callbacks+=_helpers.slurm.SignalAt",
        "--trainer.callbacks.hook=on_train_batch_end",
        "--trainer.callbacks.round=2",
    ]
    command = [*arguments(tmp_path / "job"), *signal_in_round]
    calls = enter_job(monkeypatch, tmp_path, then="kill -TERM $PPID")
    preempted = start(command)
    assert preempted.returncode == 128 + signal.SIGTERM, preempted.stderr[-3000:]
    assert calls.read_text() == "requeue 17\n"
    assert torch.load(tmp_path / "job" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] >= 2

    enter_job(monkeypatch, tmp_path, restarts=1)
    again = start(command)
    assert again.returncode == 0, again.stderr[-3000:]
    assert_same(content(tmp_path / "job"), whole)


def assert_same(run, whole):
    (got, got_results, got_clients), (state, results, clients) = run, whole
    assert got["epoch"] == 3
    assert [entry["round"] for entry in got_results["history"]] == [1, 2, 3, 4]
    assert got_results == results
    assert got_clients == clients
    tensors = [
        (leaf, other) for leaf, other in zip(leaves(got["state_dict"]), leaves(state["state_dict"]), strict=True)
    ]
    assert len(tensors) > 10
    assert all(torch.equal(leaf, other) for leaf, other in tensors)


def leaves(state):
    for _, value in sorted(state.items()):
        if isinstance(value, dict):
            yield from leaves(value)
        elif isinstance(value, torch.Tensor):
            yield value
