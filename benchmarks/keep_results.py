r"""Keep the results of finished runs of a study, so that its table can be made, checked and extended elsewhere.

    python benchmarks/keep_results.py runs/fedpac-table1-paper

puts what a table is made of (the options that each finished run was started with, its config, results and the
accuracies of its clients; no checkpoints) into ``benchmarks/measured/fedpac-table1-paper.jsonl``, without the folders
of this machine: a line is a run, and replaces an earlier one of the same name.

    python benchmarks/keep_results.py --restore fedpac-table1-paper runs/fedpac-table1-paper

makes the study's folder of them again. The command that made the study, with the same options, such as the precision
here, makes the table from there; without ``--report-only`` it adds rows that are missing:

    pfl study studies/fedpac-table1.yaml --scale paper --trainer.precision bf16-mixed \
        --output runs/fedpac-table1-paper --report-only

Tables and pictures that a report writes beside the runs are not kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MEASURED = Path(__file__).parent / "measured"
RESULTS = ("results.json", "personalized.json")
CLIENTS = ("clients.csv", "personalized.csv")

PROGRESS_FILE = "pfl_lightning.study.callbacks.ProgressFile"
"""The callback by which a study knows the versions that it has begun."""

Kept = dict[str, Any]
"""A run: its folder below the study's as ``run``, ``run.yaml`` as ``asked``, and the files of its version by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of a study, which --restore makes")
    parser.add_argument("--restore", metavar="NAME", help="a file of benchmarks/measured, without its ending")
    arguments = parser.parse_args()
    if arguments.restore:
        restore(arguments.restore, arguments.study)
        return
    kept = [keep(version, arguments.study) for version in finished(arguments.study)]
    if kept:
        name = arguments.study.resolve().name
        write_kept(name, {**{run["run"]: run for run in kept_runs(name)}, **{run["run"]: run for run in kept}})
    print("\n".join(sorted(run["run"] for run in kept)) or f"no finished run in {arguments.study}")


def finished(study: Path) -> Iterator[Path]:
    """Folders of finished runs, the newest version of each."""
    newest: dict[Path, Path] = {}
    for results in sorted(study.glob("runs/**/version_*/results.json"), key=lambda path: path.stat().st_mtime):
        if json.loads(results.read_text()).get("finished") is True:
            newest[results.parent.parent] = results.parent
    yield from newest.values()


def keep(version: Path, study: Path) -> Kept:
    """What a table is made of."""
    kept: Kept = {
        "run": version.parent.relative_to(study).as_posix(),
        "asked": _config(version.parent / "run.yaml"),
        "config.yaml": _config(version / "config.yaml"),
    }
    kept |= {name: json.loads((version / name).read_text()) for name in RESULTS if (version / name).is_file()}
    kept |= {name: (version / name).read_text() for name in CLIENTS if (version / name).is_file()}
    return kept


def kept_runs(name: str) -> list[Kept]:
    """The runs that are kept of a study, as :func:`keep` made them; none if there is no such file."""
    file = MEASURED / f"{name}.jsonl"
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    for run in runs:
        columns = run["results.json"]["history"]
        run["results.json"]["history"] = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
    return runs


def write_kept(name: str, runs: dict[str, Kept]) -> None:
    """Write a study's file, in the order of its runs' names."""
    lines = []
    for _, run in sorted(runs.items()):
        rounds = run["results.json"]["history"]
        columns = {key: [one[key] for one in rounds] for key in rounds[0]} if rounds else {}
        results = {**run["results.json"], "history": columns}
        lines.append(json.dumps({**run, "results.json": results}, separators=(",", ":")) + "\n")
    (MEASURED / f"{name}.jsonl").write_text("".join(lines))


def restore(name: str, study: Path) -> None:
    """Make the folders of kept runs again, each as its only version."""
    for run in kept_runs(name):
        version = study / run["run"] / "version_0"
        version.mkdir(parents=True)
        (version.parent / "run.yaml").write_text(yaml.safe_dump(run["asked"], sort_keys=False))
        config = run["config.yaml"]
        trainer = config.setdefault("trainer", {})
        trainer["callbacks"] = [*(trainer.get("callbacks") or ()), {"class_path": PROGRESS_FILE}]
        (version / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        for file in {*RESULTS, *CLIENTS} & run.keys():
            found = run[file]
            text = found if file in CLIENTS else json.dumps(found, separators=(",", ":")) + "\n"
            (version / file).write_text(text)


def _config(path: Path) -> dict[str, Any]:
    """A config without folders of this machine."""
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config.pop("run_dir", None)
    callbacks = config.get("trainer", {}).pop("callbacks", None) or ()
    if others := [one for one in callbacks if one["class_path"] != PROGRESS_FILE]:
        config["trainer"]["callbacks"] = others
    data = config.get("data", {}).get("init_args", {})
    if "root" in data:
        data["root"] = f"data/{Path(data['root']).name}"
    return config


if __name__ == "__main__":
    main()
