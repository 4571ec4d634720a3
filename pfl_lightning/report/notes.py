"""Sentences below the tables: what a reader would else miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pfl_lightning.metrics import idle_clients
from pfl_lightning.report.grouping import data_options
from pfl_lightning.report.ranking import not_ranked
from pfl_lightning.report.rows import MeasuredRow, blocks
from pfl_lightning.report.significance import PairedTests

__all__ = [
    "FAIRNESS",
    "data_note",
    "idle_note",
    "ranking_note",
    "reference_note",
    "round_note",
    "search_note",
    "without_note",
]

SHOWN = 6
"""Runs that a sentence names."""

FAIRNESS = (
    "Std over clients is that of all clients of a run (divided by their number), the worst decile the mean of the "
    "worst tenth of them (rounded up to whole clients); both are means over seeds."
)


def data_note(rows: Sequence[MeasuredRow]) -> str:
    """Runs of one table whose options are of the same data, and whose data was not; empty where there are none.

    A folder of data may be another one on another machine, or have changed since the first runs.
    """
    said = [_other_data(setting, some) for setting, some in blocks(rows).items()]
    if not any(said):
        return ""
    return (
        "Not all runs of a table are of the same data, though their options are, so that means and tests mix data "
        f"sets: {'; '.join(filter(None, said))}. Move the folders of those of the wrong data away, and run them again."
    )


def _other_data(setting: str, rows: Sequence[MeasuredRow]) -> str:
    """The runs of a block by fingerprint of their data, where runs of the same options have several."""
    groups: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for run in row.runs:
            same = repr((run.data.name, sorted(data_options(run).items(), key=str), run.data_seeds))
            if run.data.fingerprint:
                groups.setdefault(same, {}).setdefault(run.data.fingerprint, []).append(f"{row.label}, seed {run.seed}")
    said = [
        f"fingerprint {fingerprint.rpartition(':')[2][:8]} ({'; '.join(names[:3])}"
        + (f"; and {len(names) - 3} more)" if len(names) > 3 else ")")
        for group in groups.values()
        if len(group) > 1
        for fingerprint, names in group.items()
    ]
    return (f"{setting}: " if setting and said else "") + ", ".join(said)


def round_note(rows: Sequence[MeasuredRow], figure: str) -> str:
    """Runs whose headline is not of their last round, though nothing else says so; empty where there are none.

    Args:
        rows: The rows.
        figure: The headline.
    """
    said: dict[str, list[str]] = {}
    for row in rows:
        for run in row.runs:
            round = run.evaluation(figure).round
            if round is not None and round != run.rounds:
                said.setdefault(row.name, []).append(f"round {round} of {run.rounds}")
    listed = [f"{of}: {', '.join(dict.fromkeys(rounds))}" for of, rounds in said.items()]
    return f"Not of the last round: {'; '.join(listed)}." if listed else ""


def idle_note(rows: Sequence[MeasuredRow], figure: str) -> str:
    """Runs of which clients never trained, which says little of the method; empty where there are none.

    Args:
        rows: The rows.
        figure: The headline.
    """
    said = [
        f"{row.name}, seed {run.seed}: " + idle_clients(run.never_trained, run.evaluation(figure).clients)
        for row in rows
        for run in row.runs
        if run.never_trained and figure != "personalized_novel"
    ]
    more = f"; and {len(said) - SHOWN} more runs" if len(said) > SHOWN else ""
    return (
        f"Clients that no round drew, or whose updates were left out: {'; '.join(said[:SHOWN])}{more}." if said else ""
    )


def without_note(rows: Sequence[MeasuredRow], what: str) -> str:
    """Finished runs without the headline's results; empty where there are none.

    Args:
        rows: The rows.
        what: What they do not have, such as "test accuracy of the last round".
    """
    said = [f"{row.name}: {row.without}" for row in rows if row.without]
    return f"Finished runs that have no {what} are left out ({'; '.join(said)})." if said else ""


def search_note(rows: Sequence[MeasuredRow]) -> str:
    """Which rows had their options searched; empty where none had."""
    trials: dict[int, list[str]] = {}
    for label, number in dict.fromkeys((row.label, row.trials or 0) for row in rows):
        trials.setdefault(number, []).append(label)
    given = trials.pop(0, [])
    if not trials:
        return ""
    said = "; ".join(f"{_listed(labels)}: {number} trials" for number, labels in sorted(trials.items()))
    found = f"Options were chosen by a search on validation parts, in each setting apart ({said})."
    if given:
        found += f" Not so those of {_listed(given)}: each has the one setting that the study gives it, so that the "
        found += "comparison favors the rows that were searched."
    return found


def _listed(labels: Sequence[str]) -> str:
    """Names of rows; those of a grid have commas themselves."""
    return ("; " if any("," in label for label in labels) else ", ").join(labels)


def reference_note(reference: str, tests: Mapping[str, Sequence[PairedTests]]) -> str:
    """Blocks whose rows are not compared with the reference that was asked for; empty where there is none."""
    others = {
        setting: list(dict.fromkeys(test.reference for test in some if test.reference != reference))
        for setting, some in tests.items()
    }
    said = [f"{' and '.join(found)}{f' in {setting}' if setting else ''}" for setting, found in others.items() if found]
    if not reference or not said:
        return ""
    return (
        f"The reference {reference} has no results of the kind that is compared in some tables; the best row takes its "
        f"place there: {'; '.join(said)}."
    )


def ranking_note(rows: Sequence[MeasuredRow], figure: str) -> str:
    """What the ranking over settings leaves out; empty where it has everything."""
    found = not_ranked(rows, figure)
    if not found:
        return ""
    return f"Left out of the ranking, for which every setting must have a method: {'; '.join(found)}."
