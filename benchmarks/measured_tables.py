"""Write the tables of docs/results that are made of kept results.

    python benchmarks/measured_tables.py            # prints them
    python benchmarks/measured_tables.py --write    # puts them into the pages

A table stands below a comment that names files of ``benchmarks/measured`` (see ``keep_results.py``) and the study that
has the paper's figures:

    <!-- measured at the end: fedpac-table1-paper; fedpac-table1 -->
    <!-- measured at round 30: fedpac-table1-thirty-rounds fedpac-table1-paper; fedpac-table1 -->
    <!-- measured personalized: calibre-personalization-reduced; calibre-personalization -->

At the end of the runs a row has the last round's accuracy, the worst decile, and the round that the validation parts
choose; at a round it has that round's accuracy, with the standard deviation over seeds (of a sample) where there are
several. Several seeds are averaged, and their number is given. Personalized clients, those that trained and those that
never did, have the mean, the variance over clients and the worst decile, each averaged over seeds, as the Calibre paper
has them.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from keep_results import Kept, kept_runs

from pfl_lightning.runs.folder import folder_name

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
TABLE = re.compile(r"<!-- measured (at the end|at round \d+|personalized): ([\w -]+); ([\w-]+) -->\n(?:\|.*\n)*")
OVER_CLIENTS = ("mean", "std", "worst_decile")
AT_THE_END = (
    "method | last round, mean ± std over clients | worst decile | selected on validation | round 30 | seeds | paper "
    "| difference"
)
PERSONALIZED = (
    "method | participating: mean ± std over seeds | variance | worst decile | unseen: mean ± std over seeds "
    "| variance | worst decile | seeds"
)
AT_A_ROUND = "method | {}, mean ± std over seeds | std over clients | worst decile | seeds | paper, 200 rounds"

Run = dict[str, Any]
"""What ``results.json`` or ``personalized.json`` has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages of docs/results")
    arguments = parser.parse_args()
    for page in PAGES:
        text = page.read_text()
        if arguments.write:
            page.write_text(TABLE.sub(table, text))
        else:
            print("\n".join(table(found) for found in TABLE.finditer(text)))


def table(found: re.Match[str]) -> str:
    """The comment and the table below it, best row first."""
    when, names, study = found.groups()
    file = yaml.safe_load((ROOT / "studies" / f"{study}.yaml").read_text())
    kept = [run for name in names.split() for run in kept_runs(name)]
    figures = figures_of(file, kept)
    rows: list[tuple[float, str]] = []
    for method in methods_of(file):
        file_name = "personalized.json" if when == "personalized" else "results.json"
        runs = runs_of(kept, method, file_name)
        paper = figures.get(method)
        if runs and when == "personalized":
            rows.append(personalized(method, runs))
        elif runs and when == "at the end":
            rows.append(at_the_end(method, runs, paper))
        elif runs and in_round(int(when.split()[-1]), runs):
            rows.append(at_round(int(when.split()[-1]), method, runs, paper))
    heads = {"at the end": AT_THE_END, "personalized": PERSONALIZED}.get(when) or AT_A_ROUND.format(when[3:])
    lines = [f"| {heads} |", "|---" * (1 + heads.count("|")) + "|", *(row for _, row in sorted(rows, reverse=True))]
    if not figures and when.startswith("at round"):  # no paper has this table
        lines = [line[: line[:-1].rfind("|") + 1] for line in lines]
    return "\n".join([found.group(0).splitlines()[0], *lines]) + "\n"


def figures_of(file: dict[str, Any], kept: Sequence[Kept]) -> dict[str, Any]:
    """The paper's figures by method: where it has several settings, those of the one that was kept."""
    figures = file.get("published", {}).get("figures", {})
    if not all(isinstance(value, dict) for value in figures.values()):
        return dict(figures)
    settings = {run["run"].split("/")[1] for run in kept}
    return next((dict(own) for setting, own in figures.items() if folder_name(setting) in settings), {})


def methods_of(file: dict[str, Any]) -> list[str]:
    """The rows of a study and those that a scale adds; a scale's list selects from the study's."""
    scales = (scale.get("methods") for scale in file.get("scales", {}).values())
    added = (methods for methods in scales if isinstance(methods, dict))
    return list(dict.fromkeys([*file["methods"], *(name for methods in added for name in methods)]))


def runs_of(kept: Sequence[Kept], method: str, file: str = "results.json") -> list[Run]:
    """The results of a method's runs, one a seed: the first that is kept of it."""
    runs: dict[str, Run] = {}
    for run in kept:
        *_, name, seed = run["run"].split("/")
        if name == folder_name(method) and file in run:
            runs.setdefault(seed, run[file])
    return [runs[seed] for seed in sorted(runs)]


def personalized(method: str, runs: Sequence[Run]) -> tuple[float, str]:
    """The mean of those that trained, and a row."""
    shown = [method]
    for group in ("participating", "novel"):
        means = [100 * run[group]["mean"] for run in runs]
        shown.append(f"{statistics.fmean(means):.2f}" + (f" ± {statistics.stdev(means):.2f}" if len(means) > 1 else ""))
        variance, decile = (statistics.fmean(run[group][key] for run in runs) for key in ("variance", "worst_decile"))
        shown += [f"{1e4 * variance:.1f}", f"{100 * decile:.2f}"]
    mean = percent(runs, lambda run: run["participating"]["mean"])
    return mean, f"| {' | '.join(shown)} | {len(runs)} |"


def percent(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """The mean over seeds, in percent."""
    return 100 * statistics.fmean(value(run) for run in runs)


def in_round(number: int, runs: Sequence[Run]) -> bool:
    """Whether the round of a number was evaluated in all runs."""
    return all(len(run["history"]) >= number and run["history"][number - 1].get("test") for run in runs)


def last(runs: Sequence[Run]) -> list[float]:
    """Mean, standard deviation and worst decile over clients, after the last round."""
    return [percent(runs, lambda run, key=key: run["accuracy"]["last"]["test"][key]) for key in OVER_CLIENTS]


def at_the_end(method: str, runs: Sequence[Run], paper: float | None) -> tuple[float, str]:
    """The mean, and a row."""
    mean, std, decile = last(runs)
    early = f"{percent(runs, lambda run: run['history'][29]['test']['accuracy']):.2f}" if in_round(30, runs) else "-"
    shown = f"{method} | {mean:.2f} ± {std:.2f} | {decile:.2f} | {selected(runs)} | {early} | {len(runs)}"
    return mean, f"| {shown} | " + (f"{paper:.2f} | {mean - paper:+.2f} |" if paper else "- | - |")


def selected(runs: Sequence[Run]) -> str:
    """The accuracy of the rounds that the validation parts choose, and these rounds; a dash without such parts."""
    best = [run["accuracy"]["validation_selected"] for run in runs]
    if None in best:
        return "-"
    mean = 100 * statistics.fmean(one["test"]["mean"] for one in best)
    return f"{mean:.2f} (round {', '.join(str(one['round']) for one in best)})"


def at_round(number: int, method: str, runs: Sequence[Run], paper: float | None) -> tuple[float, str]:
    """The mean, and a row; the spread over clients is known of a last round alone."""
    accuracies = [100 * run["history"][number - 1]["test"]["accuracy"] for run in runs]
    mean = statistics.fmean(accuracies)
    shown = f"{mean:.2f}" + (f" ± {statistics.stdev(accuracies):.2f}" if len(runs) > 1 else "")
    spread = (
        [f"{value:.2f}" for value in last(runs)[1:]] if all(run["rounds"] == number for run in runs) else ["-", "-"]
    )
    return mean, f"| {method} | {shown} | {' | '.join(spread)} | {len(runs)} | {f'{paper:.2f}' if paper else '-'} |"


if __name__ == "__main__":
    main()
