"""A report of a study that is as plain as can be: one line for each row, with the numbers that no clock changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pfl_lightning.report.rows import ReportSettings, Row


def figures(run: Path, choice: str) -> list[Any]:
    """What the table would show of a run, apart from its time."""
    results = json.loads((run / "results.json").read_text())
    history = [{key: value for key, value in entry.items() if key != "seconds"} for entry in results["history"]]
    personalized = run / "personalized.json"
    return [
        *(results["accuracy"][choice], results["bytes"], results["rounds"], history),
        (run / "clients.csv").read_text(),
        personalized.read_text() if personalized.is_file() else "",
    ]


def write_report(rows: Any, folder: Path, settings: ReportSettings) -> list[Path]:
    table = [
        [row.setting, row.label, row.published, [figures(run, settings.choice) for run in row.runs]] for row in rows
    ]
    path = folder / "table.md"
    path.write_text(json.dumps([settings.title, settings.note, table], indent=1))
    return [path]


def live_table(rows: Any, settings: ReportSettings) -> str:
    return "\n".join(f"{row.setting} {row.label}: {len(row.runs)} runs" for row in rows)


def install() -> None:
    """Take the place of the package's own report in this process."""
    module = ModuleType("pfl_lightning.report")
    for one in (Row, ReportSettings, write_report, live_table):
        setattr(module, one.__name__, one)
    sys.modules["pfl_lightning.report"] = module
    import pfl_lightning

    pfl_lightning.report = module  # type: ignore[attr-defined]


if __name__ == "__main__":  # python -m _helpers.plain_report study FILE: pfl with this report
    install()
    from pfl_lightning.cli.main import main

    main()
