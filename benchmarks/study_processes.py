"""Runs of a study one after the other and several at once: how many times as many are done in an hour.

    python benchmarks/study_processes.py --processes 2

Both studies are made in one call, each of the same runs of one thread, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

STUDY = {
    "title": "Runs of one method on the digits",
    "base": {
        "model": {"encoder": "small_cnn", "method": {"class_path": "FedAvg", "init_args": {"lr": 0.02, "epochs": 5}}},
        "data": {
            "class_path": "Digits",
            "init_args": {
                "batch_size": 10,
                "partition": {
                    "class_path": "DominantClasses",
                    "init_args": {"num_clients": 10, "samples_per_client": 100, "seed": 0},
                },
            },
        },
        "trainer": {"enable_progress_bar": False, "enable_model_summary": False},
    },
    "methods": {"FedAvg": {}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "study.yaml"
        study.write_text(yaml.safe_dump(STUDY | {"seeds": list(range(args.runs))}))
        seconds = {number: measure(study, number, args.rounds) for number in (1, args.processes)}
    for number, taken in seconds.items():
        print(f"{number} at a time: {args.runs} runs of {args.rounds} rounds in {taken:.1f} s")
    print(f"throughput: {seconds[1] / seconds[args.processes]:.2f} times")


def measure(study: Path, processes: int, rounds: int) -> float:
    """Seconds of the study, with so many runs at once."""
    command = [sys.executable, "-m", "pfl_lightning.cli", "study", str(study), "--processes", str(processes)]
    command += ["--output", str(study.parent / str(processes)), "--trainer.max_epochs", str(rounds)]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
