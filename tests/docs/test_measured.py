"""Results that are kept in benchmarks/measured: they are whole, and the tables of docs/results are theirs."""

import csv
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import yaml
from _helpers.results import kept_runs, restore, valid_content

from pfl_lightning.cli import main

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "measured"
RUNS = [
    (file.stem, *run["run"].split("/")[1:], run) for file in sorted(MEASURED.iterdir()) for run in kept_runs(file.stem)
]
"""File, setting, method and seed of every kept run, and what is kept of it."""
TABLE = re.compile(
    r"<!-- measured (at the end|at round \d+|personalized): ([\w -]+); ([\w-]+) -->\n\|.*\n\|.*\n((?:\|.*\n)+)"
)
LEADERBOARD, LIARS = "leaderboard-small", "robust-cifar10-small"
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
TABLES = [table for page in PAGES for table in TABLE.findall(page.read_text())]


@pytest.mark.parametrize("run", [one[-1] for one in RUNS], ids=["-".join(one[:-1]) for one in RUNS])
def test_a_kept_run_is_whole(run):
    results = valid_content(run["results.json"])
    assert results["finished"] is True
    assert len(results["history"]) == results["rounds"]
    assert len(run["clients.csv"].splitlines()) == 1 + results["num_clients"]
    assert results["method"] == run["asked"]["model"]["method"]["class_path"].rpartition(".")[2]
    assert results["seed"] == run["asked"]["seed_everything"]
    if "personalized.json" in run:
        valid_content(run["personalized.json"], "personalized")
    assert "/root/" not in json.dumps(run), "a folder of one machine is named"


def percent(values):
    return f"{100 * statistics.fmean(values):.2f}"


def kept(files, method):
    """Every seed's run of a method, in the first of the files that has it."""
    name = re.sub(r"[^\w+]+", "-", method).strip("-")
    found = {}
    for file in files:
        for of, _, own, seed, run in RUNS:
            if (of, own) == (file, name):
                found.setdefault(seed, run)
    return [found[seed] for seed in sorted(found)]


def accuracies(run):
    """The clients' test accuracies after the last round."""
    return sorted(float(row["test_accuracy_last"]) for row in csv.DictReader(run["clients.csv"].splitlines()))


def spread(runs):
    """Mean, standard deviation and mean of the worst tenth over clients."""
    clients = [accuracies(run) for run in runs]
    tenths = [statistics.fmean(values[: max(1, len(values) // 10)]) for values in clients]
    return percent(map(statistics.fmean, clients)), percent(map(statistics.pstdev, clients)), percent(tenths)


def named(file):
    """The rows of a study, and those that its scales add, which a list does not."""
    found = [scale.get("methods") for scale in file["scales"].values()]
    return {*file["methods"], *(name for methods in found if isinstance(methods, dict) for name in methods)}


@pytest.mark.parametrize(("when", "folders", "study", "rows"), TABLES, ids=[" ".join(one[:2]) for one in TABLES])
def test_a_table_is_that_of_the_kept_results(when, folders, study, rows):
    file = yaml.safe_load((ROOT / "studies" / f"{study}.yaml").read_text())
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    assert {row[0] for row in shown} == {method for method in named(file) if kept(folders.split(), method)}
    for method, *cells in shown:
        runs = kept(folders.split(), method)
        results = [run["results.json"] for run in runs]
        figures = file.get("published", {}).get("figures", {})
        [setting] = {run["run"].split("/")[1] for run in runs}  # such as 10-clients, where a paper has several
        paper = next((own for name, own in figures.items() if name.replace(" ", "-") == setting), figures).get(method)
        if "published" not in file and when.startswith("at round"):
            cells = [*cells, "-"]  # such a table has no column for a paper
        if when == "personalized":
            check_personalized(cells, runs)
        elif when == "at the end":
            check_the_end(cells, runs, results, paper)
        else:
            check_a_round(int(when.split()[-1]), cells, runs, results, paper)


def check_personalized(cells, runs):
    """Against the clients' rows."""
    assert cells[-1] == str(len(runs))
    for novel, (mean, variance, decile) in (("0", cells[:3]), ("1", cells[3:6])):
        values = []
        for run in runs:
            rows = csv.DictReader(run["personalized.csv"].splitlines())
            values.append(sorted(float(row["test_accuracy"]) for row in rows if row["novel"] == novel))
        means = [statistics.fmean(some) for some in values]
        over_seeds = f" ± {100 * statistics.stdev(means):.2f}" if len(means) > 1 else ""
        assert mean == percent(means) + over_seeds
        assert variance == f"{1e4 * statistics.fmean(map(statistics.pvariance, values)):.1f}"
        assert decile == percent(statistics.fmean(some[: -(-len(some) // 10)]) for some in values)


def check_the_end(cells, runs, results, paper):
    last, decile, selected, early, seeds, published, difference = cells
    mean, std, worst = spread(runs)
    shown, over_clients = last.split(" ± ")
    assert float(shown) == pytest.approx(float(mean), abs=0.0101)  # 89.125 is rounded up or down by the order of a sum
    assert (over_clients, decile, seeds) == (std, worst, str(len(runs)))
    best = [one["accuracy"]["validation_selected"] for one in results]
    if any(one is None for one in best):  # no validation parts
        assert selected == "-"
    else:
        rounds = ", ".join(str(one["round"]) for one in best)
        assert selected == f"{percent(one['test']['mean'] for one in best)} (round {rounds})"
    has_thirty = all(len(one["history"]) >= 30 and one["history"][29]["test"] is not None for one in results)
    assert early == (percent(one["history"][29]["test"]["accuracy"] for one in results) if has_thirty else "-")
    if paper is None:
        assert (published, difference) == ("-", "-")
        return
    assert float(published) == paper
    assert float(difference) == pytest.approx(float(mean) - paper, abs=0.0101)  # both are rounded


def check_a_round(number, cells, runs, results, paper):
    mean, std, decile, seeds, published = cells
    history = [one["history"][number - 1] for one in results]
    assert {one["round"] for one in history} == {number}
    values = [one["test"]["accuracy"] for one in history]
    over_seeds = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    assert mean == percent(values) + over_seeds
    assert (std, decile) == (spread(runs)[1:] if {one["rounds"] for one in results} == {number} else ("-", "-"))
    assert (seeds, published) == (str(len(runs)), "-" if paper is None else f"{paper:.2f}")


def test_the_readme_has_the_figures_of_the_kept_results():
    figures = yaml.safe_load((ROOT / "studies" / "fedpac-table1.yaml").read_text())["published"]["figures"]
    (line,) = re.findall(r"^\*\*Fidelity\.\*\*.*", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    shown = re.findall(r"([\w-]+) (\d\d\.\d\d) \((?:the paper: )?(\d\d\.\d\d)\)", line)
    files = ["fedpac-table1-paper"]
    assert {method for method, *_ in shown} == {method for file, _, method, *_ in RUNS if file in files}
    for method, mean, paper in shown:
        means = [statistics.fmean(accuracies(run)) for run in kept(files, method)]
        assert float(mean) == pytest.approx(100 * statistics.fmean(means), abs=0.00501)
        assert float(paper) == pytest.approx(figures[method], abs=0.00501)


def test_every_kept_run_is_in_a_table():
    shown = {folder for _, folders, *_ in TABLES for folder in folders.split()}
    assert {*shown, LEADERBOARD, LIARS, "robust"} == {file for file, *_ in RUNS}


def test_the_leaderboard_is_that_of_the_kept_results():
    rows = re.findall(
        r"^\| ([\w-]+) \|((?: [\d.]+ \|){6})$", (ROOT / "docs" / "leaderboard.md").read_text(), flags=re.MULTILINE
    )
    found = {(setting, method): run["results.json"] for file, setting, method, _, run in RUNS if file == LEADERBOARD}
    assert {method for method, _ in rows} == {method for _, method in found}
    for method, cells in rows:
        images, domains = (found[setting, method] for setting in ("CIFAR-10-dominant-classes", "PACS-domains"))
        scores = [
            100 * one["accuracy"]["last"]["test"][key] for one in (images, domains) for key in ("mean", "worst_decile")
        ]
        sent = sum(images["bytes"][way] for way in ("up", "down")) / images["rounds"] / images["num_clients"]
        expected = [*scores, sent / 1e6, images["seconds_per_round"]]
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(("file", "count"), [("robust", 212), (LIARS, 70)])
def test_the_table_of_liars_is_that_of_the_kept_results(file, count):
    found = {(setting, method): run["results.json"] for name, setting, method, _, run in RUNS if name == file}
    assert len(found) == count
    every = re.findall(
        r"^\| method \| nobody lies .*\n\|.*\n(?:\|.*\n)+", (ROOT / "docs" / "robust.md").read_text(), re.M
    )
    (page,) = (table for table in every if table.count("\n") - 2 == len({method for _, method in found}))
    header, _, *rows = [[cell.strip() for cell in line[1:-2].split("|")] for line in page.splitlines(keepends=True)]
    shown = {
        (setting.replace(" ", "-"), row[0].replace(" ", "-")): cell
        for row in rows
        for setting, cell in zip(header[1:], row[1:], strict=True)
    }
    assert {place for place, cell in shown.items() if cell != "ended"} == set(found)
    for place, results in found.items():
        assert float(shown[place]) == pytest.approx(100 * results["attack"]["last"]["test_accuracy/honest"], abs=0.0501)


def test_a_restored_study_of_liars_takes_up_its_runs(tmp_path, monkeypatch, capsys):
    """Their callbacks are options of a run: without them all would be runs of something else."""
    monkeypatch.chdir(ROOT)
    restore(LIARS, tmp_path / "kept")
    words = ["studies/robust-cifar10.yaml", "--scale", "small", "--output", str(tmp_path / "kept"), "--check"]
    main(["study", *words, "--data.init_args.root", "data/cifar10"])
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines() if ", seed 0" in line]
    assert (told.count("done"), told.count("new")) == (70, 2)


COMMAND = re.compile(r"^ *pfl (study (?:.*\\\n)*.*--report-only)$", flags=re.MULTILINE)
"""The command that makes a table of kept results."""


@pytest.mark.parametrize("path", ["docs/results.md", "benchmarks/keep_results.py"])
def test_the_command_that_makes_the_table_has_the_options_of_the_kept_runs(path, tmp_path, monkeypatch, capsys):
    (command,) = COMMAND.findall((ROOT / path).read_text())
    words = shlex.split(command.replace("\\\n", " "))
    folder = words.index("--output") + 1
    restore(Path(words[folder]).name, tmp_path / "kept")
    words[folder] = str(tmp_path / "kept")
    monkeypatch.chdir(ROOT)
    main(words)
    said = capsys.readouterr().out
    assert "table.md" in said
    assert "other options" not in said
