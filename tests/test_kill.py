"""A process that is really killed in the middle of a round, and the command that goes on with it.

The first test takes over 10 s: two runs are processes of their own, which import torch.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

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
    results = json.loads((version / "results.json").read_text())
    del results["seconds_per_round"]
    return state, results, (version / "clients.csv").read_text()


def test_killed_in_the_middle_of_a_round_and_resumed(tmp_path):
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

    resumed = start([*arguments(tmp_path / "killed"), "--ckpt_path", "last"])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    main(arguments(tmp_path / "whole"))

    (got, got_results, got_clients), (state, results, clients) = (
        content(tmp_path / run) for run in ("killed", "whole")
    )
    assert got["epoch"] == 3
    assert [entry["round"] for entry in got_results["history"]] == [0, 1, 2, 3]
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
