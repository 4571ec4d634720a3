"""Results that are kept in benchmarks/measured: they are whole, and the tables of docs/results.md are theirs."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from _helpers.results import valid

from pfl_lightning.cli import main

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "benchmarks" / "measured").glob("*/runs/*/*/seed_*"))
TABLE = re.compile(r"<!-- measured: ([\w-]+), ([\w-]+) -->\n\|.*\n\|.*\n((?:\|.*\n)+)")
TABLES = TABLE.findall((ROOT / "docs" / "results.md").read_text())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(run.parts[-5:]))
def test_a_kept_run_is_whole(run):
    results = valid(run / "version_0" / "results.json")
    assert results["finished"] is True
    assert len(results["history"]) == results["rounds"]
    clients = (run / "version_0" / "clients.csv").read_text().splitlines()
    assert len(clients) == 1 + results["num_clients"]
    asked = yaml.safe_load((run / "run.yaml").read_text())
    assert results["method"] == asked["model"]["method"]["class_path"].rpartition(".")[2]
    assert results["seed"] == asked["seed_everything"]
    for file in run.glob("**/*.*"):
        assert "/root/" not in file.read_text(), f"{file} names a folder of one machine"


def percent(value):
    return f"{100 * value:.2f}"


@pytest.mark.parametrize(("folder", "study", "rows"), TABLES, ids=[folder for folder, *_ in TABLES])
def test_a_table_is_that_of_the_kept_results(folder, study, rows):
    published = yaml.safe_load((ROOT / "studies" / f"{study}.yaml").read_text())["published"]["figures"]
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    kept = {run.parent.name: run for run in RUNS if run.parts[-5] == folder}
    assert {row[0] for row in shown} == set(kept)
    for method, last, decile, selected, early, paper, difference in shown:
        results = valid(kept[method] / "version_0" / "results.json")
        end, best = results["accuracy"]["last"], results["accuracy"]["validation_selected"]
        test = end["test"]
        assert end["round"] == results["rounds"]
        assert last == f"{percent(test['mean'])} ± {percent(test['std'])}"
        assert decile == percent(test["worst_decile"])
        assert selected == f"{percent(best['test']['mean'])} (round {best['round']})"
        assert early == percent(results["history"][29]["test"]["accuracy"])
        assert float(paper) == published[method]
        assert difference == f"{100 * test['mean'] - published[method]:+.2f}"


def test_there_are_tables():
    assert {folder for folder, *_ in TABLES} == {run.parts[-5] for run in RUNS}


COMMAND = re.compile(r"^ *pfl (study (?:.*\\\n)*.*--report-only)$", flags=re.MULTILINE)
"""The command that makes a table of kept results."""


@pytest.mark.parametrize("path", ["docs/results.md", "benchmarks/keep_results.py"])
def test_the_command_that_makes_the_table_has_the_options_of_the_kept_runs(path, tmp_path, monkeypatch, capsys):
    (command,) = COMMAND.findall((ROOT / path).read_text())
    words = shlex.split(command.replace("\\\n", " "))
    folder = words.index("--output") + 1
    words[folder] = str(shutil.copytree(ROOT / words[folder], tmp_path / "kept"))
    monkeypatch.chdir(ROOT)
    main(words)
    said = capsys.readouterr().out
    assert "table.md" in said
    assert "other options" not in said
