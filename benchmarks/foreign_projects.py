"""Modules of installed packages: federated by the one line, and compared with the plain run bit for bit.

Prints the table of docs/drop_in_projects.md. The projects are those of tests/_helpers/foreign. Missing packages are
named and left out: ``pip install -e ".[foreign]"`` installs them.

usage: python benchmarks/foreign_projects.py [PATTERN]
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import lightning
import torch
from _helpers.foreign import PROJECTS
from _helpers.foreign.project import Project, Reseeded, differing, federated_run, one_client_run, plain_run, quiet

from pfl_lightning.methods import FedAvg, FedPer

EPOCHS = 2


def main(pattern: str = "") -> None:
    """Print a row for each project whose name fits."""
    print("| kind | package | module | data | by the one line | one client is the plain run |")
    print("|---|---|---|---|---|---|")
    for project in PROJECTS:
        if not re.search(pattern, project.id):
            continue
        if not project.is_installed():
            print(f"{project.id}: not installed", file=sys.stderr)
            continue
        with quiet():
            print(row(project), flush=True)
    print(
        f"\n{platform.processor() or platform.machine()}, CPU; Python {platform.python_version()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}; {date.today()}"
    )


def row(project: Project) -> str:
    """A row of the table."""
    plain = plain_run(project, EPOCHS, Reseeded())
    methods = (FedAvg, FedPer) if project.head else (FedAvg,)
    federated = [attempt(lambda method=method: federated_by(project, method)) for method in methods]
    wrong = [text for text in federated if text]
    exact = attempt(lambda: compared(project, plain))
    names = ", ".join(method.__name__ for method in methods)
    result = wrong[0] if wrong else f"{names}{f' ({project.changes})' if project.changes else ''}"
    cells = (
        project.kind,
        f"{project.package} {version(project.package)}",
        f"`{project.module}`",
        project.data,
        result,
        "–" if wrong else exact or "yes",
    )
    return f"| {' | '.join(cells)} |"


def attempt(run: Callable[[], Any]) -> str:
    """What is wrong with a run; empty where nothing is."""
    try:
        return run() or ""
    except Exception as error:
        first = str(error).splitlines()[0].replace("|", "/")
        return f"fails: {type(error).__name__}: {first[:150]}"


def federated_by(project: Project, method: type) -> str:
    """Two rounds under a method."""
    with tempfile.TemporaryDirectory() as folder:
        federation, _ = federated_run(project, Path(folder), method)
    return "" if differing(project.made()[0], federation.global_model()) else "nothing was trained"


def compared(project: Project, plain: Any) -> str:
    """How one round of one client differs from the plain run."""
    found = max(len(differing(plain, own)) for own in one_client_run(project, EPOCHS))
    return f"{found} of {len(plain.state_dict())} tensors differ" if found else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
