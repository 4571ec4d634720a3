"""Runs of a study one after the other and several at once: how many times as many are done in an hour.

    python benchmarks/study_processes.py --processes 2
    python benchmarks/study_processes.py --starts --runs 12 --rounds 5

All studies are made in one call, each of the same runs of one thread, on a machine that does nothing else. With
``--starts`` they run one after the other: once in copies of a warm process, once each in a fresh one, and the seconds
of the whole study are put beside those of all rounds of its runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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


FRESH = """
from pfl_lightning.cli import main
from pfl_lightning.jobs.processes import LocalProcess
from pfl_lightning.study import conduct

conduct.local_starter = lambda threads: LocalProcess
main()
"""
"""A study whose runs are not copies of a warm process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", action="store_true", help="compare starts of runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "study.yaml"
        study.write_text(yaml.safe_dump(STUDY | {"seeds": list(range(args.runs))}))
        if args.starts:
            for name, program in (("warm", ["-m", "pfl_lightning.cli"]), ("fresh", ["-c", FRESH])):
                taken = measure(study, 1, args.rounds, name, program)
                results = [json.loads(path.read_text()) for path in (study.parent / name).glob("runs/**/results.json")]
                rounds = sum(float(result["seconds"]) for result in results)
                print(
                    f"{name} starts: {len(results)} runs of {args.rounds} rounds in {taken:.1f} s, "
                    f"{taken / rounds:.2f} times the {rounds:.1f} s of their rounds"
                )
            return
        numbers = (1, args.processes)
        seconds = [measure(study, number, args.rounds, str(place)) for place, number in enumerate(numbers)]
    for number, taken in zip(numbers, seconds, strict=True):
        print(f"{number} at a time: {args.runs} runs of {args.rounds} rounds in {taken:.1f} s")
    print(f"throughput: {seconds[0] / seconds[1]:.2f} times")


def measure(
    study: Path, processes: int, rounds: int, name: str, program: Sequence[str] = ("-m", "pfl_lightning.cli")
) -> float:
    """Seconds of the study, with so many runs at once."""
    command = [sys.executable, *program, "study", str(study), "--processes", str(processes)]
    command += ["--output", str(study.parent / name), "--trainer.max_epochs", str(rounds)]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
