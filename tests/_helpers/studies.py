"""Small studies, and runs that are played in this process or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from pfl_lightning.study.check import answer

TINY = {
    "model": {"encoder": "mlp", "method": {"init_args": {"lr": 0.05, "epochs": 1}}},
    "data": {
        "class_path": "Digits",
        "init_args": {
            "batch_size": 10,
            "validation_share": 0.2,
            "partition": {
                "class_path": "DominantClasses",
                "init_args": {"num_clients": 3, "samples_per_client": 30, "seed": 0},
            },
        },
    },
    "trainer": {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False},
}
"""A config of three clients on the digits."""

METHODS = {name: {"model": {"method": {"class_path": name}}} for name in ("FedAvg", "FedPer")}


def write_study(folder: Path, **keys: Any) -> Path:
    """Write a study of two methods and one seed, with further keys or with others."""
    path = folder / "tiny.yaml"
    content = {"title": "A tiny study", "base": TINY, "methods": METHODS, "seeds": [0], **keys}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def finish(folder: Path, accuracy: float = 0.5, **results: Any) -> None:
    """Leave what a finished run leaves."""
    version = folder / "version_0"
    version.mkdir(parents=True, exist_ok=True)
    (version / "results.json").write_text(json.dumps({"finished": True, "accuracy": accuracy, **results}))


class PretendedProcess:
    """A run that ends after two looks: done, or with an exit code."""

    def __init__(self, folder: Path, code: int, endless: bool) -> None:
        self.folder, self.code, self.endless = folder, code, endless
        self.looks = 0
        self.stopped = self.killed = False

    def poll(self) -> int | None:
        if self.stopped or self.killed:
            return -15
        self.looks += 1
        if self.endless or self.looks < 2:
            return None
        if self.code == 0:
            finish(self.folder)
        return self.code

    def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True


class PretendedStarter:
    """Starts nothing; runs whose folders are named in ``codes`` end with these exit codes, one after the other.

    Configs are checked in this process.
    """

    def __init__(self, codes: Mapping[str, list[int]] | None = None, *, endless: bool = False) -> None:
        self.codes = {name: list(found) for name, found in (codes or {}).items()}
        self.endless = endless
        self.commands: list[tuple[str, ...]] = []
        self.processes: list[PretendedProcess] = []
        self.most = 0

    def __call__(self, command: Any) -> PretendedProcess:
        if command.entry == "pfl_lightning.study.check:answer":
            return checked_here(command)
        folder = command.log.parent
        waiting = self.codes.get(folder.parent.name, [])
        code = waiting.pop(0) if waiting else 0
        if code:
            command.log.write_text(f"--- 2026-11-22 12:00:00 pfl fit\nsome words\npfl: exit {code} was asked for\n")
        self.commands.append(command.argv)
        self.processes.append(PretendedProcess(folder, code, self.endless))
        self.most = max(self.most, sum(process.looks < 2 for process in self.processes))
        return self.processes[-1]


def checked_here(job: Any) -> Any:
    """The job that checks configs, played in this process."""
    with patch.object(sys, "argv", ["pfl", *job.argv]):
        answer()
    process = PretendedProcess(job.log.parent, 0, False)
    process.poll = lambda: 0  # type: ignore[method-assign]
    return process


class StarterHere:
    """Plays each run in this process before it goes on."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, command: Any) -> PretendedProcess:
        from pfl_lightning.cli import main

        self.commands.append(command.argv)
        main(list(command.argv))
        process = PretendedProcess(command.log.parent, 0, False)
        process.poll = lambda: 0  # type: ignore[method-assign]
        return process


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.at_tick = lambda: None

    def started(self, run: Any, resumed: bool) -> None:
        self.events.append(("resumed" if resumed else "started", run.name))

    def finished(self, run: Any) -> None:
        self.events.append(("finished", run.name))

    def failed(self, run: Any, code: int, lines: str, again: bool) -> None:
        self.events.append(("again" if again else "failed", run.name, lines))

    def elsewhere(self, run: Any) -> None:
        self.events.append(("elsewhere", run.name))

    def tick(self) -> None:
        self.at_tick()
