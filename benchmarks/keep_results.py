r"""Keep the results of finished runs of a study, so that its table can be made, checked and extended elsewhere.

    python benchmarks/keep_results.py runs/fedpac-table1-paper

copies of every finished run what a table is made of (the options it was started with, its config, results and the
accuracies of its clients; no checkpoints) to ``benchmarks/measured/fedpac-table1-paper``, without the folders of this
machine. The table is made again from there by the command that made the study, with the same options, such as the
precision here; without ``--report-only`` it adds rows that are missing:

    pfl study studies/fedpac-table1.yaml --scale paper --trainer.precision bf16-mixed \
        --output benchmarks/measured/fedpac-table1-paper --report-only

Tables and pictures that a report writes beside the runs are not kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MEASURED = Path(__file__).parent / "measured"
RESULTS = ("results.json", "personalized.json")
CLIENTS = ("clients.csv", "personalized.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of a study")
    arguments = parser.parse_args()
    kept = [keep(version, arguments.study) for version in finished(arguments.study)]
    print("\n".join(sorted(str(folder) for folder in kept)) or f"no finished run in {arguments.study}")


def finished(study: Path) -> Iterator[Path]:
    """Folders of finished runs, the newest version of each."""
    newest: dict[Path, Path] = {}
    for results in sorted(study.glob("runs/**/version_*/results.json"), key=lambda path: path.stat().st_mtime):
        if json.loads(results.read_text()).get("finished") is True:
            newest[results.parent.parent] = results.parent
    yield from newest.values()


def keep(version: Path, study: Path) -> Path:
    """Copy what a table is made of; returns the run's new folder."""
    run = MEASURED / study.resolve().name / version.parent.relative_to(study)
    shutil.rmtree(run, ignore_errors=True)
    (run / "version_0").mkdir(parents=True)
    _copy_config(version.parent / "run.yaml", run / "run.yaml")
    _copy_config(version / "config.yaml", run / "version_0" / "config.yaml")
    for name in RESULTS:
        if (version / name).is_file():
            found = json.loads((version / name).read_text())
            (run / "version_0" / name).write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for name in CLIENTS:
        if (version / name).is_file():
            shutil.copyfile(version / name, run / "version_0" / name)
    return run


def _copy_config(path: Path, copy: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config.pop("run_dir", None)
    config.get("trainer", {}).pop("callbacks", None)
    data = config.get("data", {}).get("init_args", {})
    if "root" in data:
        data["root"] = f"data/{Path(data['root']).name}"
    copy.write_text(yaml.safe_dump(config, sort_keys=False))


if __name__ == "__main__":
    main()
