"""Sentences below the tables: what a reader would else miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pfl_lightning.metrics import idle_clients
from pfl_lightning.report.grouping import data_options
from pfl_lightning.report.rows import MeasuredRow, ReportSettings
from pfl_lightning.report.significance import CAVEAT, PairedTests, Ranking
from pfl_lightning.report.tables import Column
from pfl_lightning.runs.changes import listed_some

FAIRNESS = (
    "Std over clients is that of all clients of a run (divided by their number), the worst decile the mean of the "
    "worst tenth of them (rounded up to whole clients); both are means over seeds."
)

SEPARATE = (
    "The runs are of several settings, data sets or partitions: each has its own table. The CSV file of runs has "
    "the fingerprints of their data and partitions."
)

NEIGHBORS = (
    "Nearest-neighbor accuracies are of features without a head (each test sample takes the class of the nearest "
    "training samples): they have their own columns and compare only with each other."
)


def notes(
    rows: Sequence[MeasuredRow],
    columns: Sequence[Column],
    settings: ReportSettings,
    tests: Mapping[str, Sequence[PairedTests]],
    ranking: Ranking | None,
) -> list[str]:
    """What one must know to read the tables.

    Args:
        rows: All rows.
        columns: The figures that any of them has.
        settings: What is shown.
        tests: Paired tests by setting.
        ranking: Ranks over settings.
    """
    done = sum(len(row.runs) + row.without for row in rows)
    expected = sum(row.planned for row in rows)
    source = f"Published figures: {settings.source}. The difference is measured minus published, in points."
    chosen = settings.figure == "test" and settings.choice != "last"  # a round that the caption names
    found = [
        caption(rows, columns, settings),
        data_note(rows),
        SEPARATE if len({row.setting for row in rows}) > 1 else "",
        "" if chosen else _round_note(rows, settings.figure),
        without_note(rows, settings),
        _idle_note(rows, settings.figure),
        f"{done} of {expected} runs are finished; the table has these." if done < expected else "",
        NEIGHBORS if any(column.name.startswith("nearest_neighbor") for column in columns) else "",
        source if settings.source else "",
        FAIRNESS if any(column.name.endswith("worst_decile") for column in columns) else "",
        CAVEAT if any(tests.values()) else "",
        _ranking_note(rows, ranking),
        search_note(rows),
        settings.note,
    ]
    return [*filter(None, found)]


def caption(rows: Sequence[MeasuredRow], columns: Sequence[Column], settings: ReportSettings) -> str:
    """What the figures are."""
    if any(row.runs for row in rows) and not any(column.is_headline for column in columns):
        return f"No run has a {headline(settings)}: it has no column."
    choice = f", {settings.choice.replace('_', ' ')} round" if settings.figure == "test" else ""
    what = f"{settings.figures[settings.figure]}, mean over clients{choice}"
    return f"{what[0].upper()}{what[1:]}; ± is the standard deviation over seeds (n - 1)."


def headline(settings: ReportSettings) -> str:
    """The headline, without its statistics."""
    of_round = f" of the {settings.choice.replace('_', ' ')} round" if settings.figure == "test" else ""
    return f"{settings.figures[settings.figure]}{of_round}"


def data_note(rows: Sequence[MeasuredRow]) -> str:
    """Runs of one table whose options are of the same data, and whose data was not; empty where there are none.

    A folder of data may be another one on another machine, or have changed since the first runs.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for run in row.runs:
            same = repr((row.setting, run.data.name, sorted(data_options(run).items(), key=str), run.data_seeds))
            if run.data.fingerprint:
                groups.setdefault(same, {}).setdefault(run.data.fingerprint, []).append(f"{row.name}, seed {run.seed}")
    mixed = [(mark, names) for group in groups.values() if len(group) > 1 for mark, names in group.items()]
    listed = ", ".join(f"fingerprint {mark.rpartition(':')[2][:8]} ({listed_some(names)})" for mark, names in mixed)
    return (
        f"Runs of one table have the same options but different data, so means and tests mix data sets: {listed}. "
        "Move the folders of runs with the wrong data away, and run them again."
        if mixed
        else ""
    )


def _round_note(rows: Sequence[MeasuredRow], figure: str) -> str:
    """Runs whose headline is not of their last round, though nothing else says so; empty where there are none."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for run in row.runs:
            if run.evaluation(figure).round not in (None, run.rounds):
                found.setdefault(row.name, {})[f"round {run.evaluation(figure).round} of {run.rounds}"] = None
    listed = "; ".join(f"{name}: {', '.join(rounds)}" for name, rounds in found.items())
    return f"Not of the last round: {listed}." if found else ""


def _idle_note(rows: Sequence[MeasuredRow], figure: str) -> str:
    """Runs of which clients never trained, which says little of the method; empty where there are none."""
    found = [
        f"{row.name}, seed {run.seed}: " + idle_clients(run.never_trained, run.evaluation(figure).clients)
        for row in rows
        for run in row.runs
        if run.never_trained and figure != "personalized_novel"
    ]
    return f"Clients that no round drew, or whose updates were left out: {listed_some(found)}." if found else ""


def without_note(rows: Sequence[MeasuredRow], settings: ReportSettings) -> str:
    """Finished runs without the headline's results; empty where there are none."""
    listed = "; ".join(f"{row.name}: {row.without}" for row in rows if row.without)
    return f"Finished runs that have no {headline(settings)} are left out ({listed})." if listed else ""


def search_note(rows: Sequence[MeasuredRow]) -> str:
    """Which rows had their options searched; empty where none had."""
    trials: dict[int, list[str]] = {}
    for label, number in dict.fromkeys((row.label, row.trials or 0) for row in rows):
        trials.setdefault(number, []).append(label)
    fixed = trials.pop(0, [])
    searched = "; ".join(f"{_listed(labels)}: {number} trials" for number, labels in sorted(trials.items()))
    rest = (
        f" Those of {_listed(fixed)} were not: each has the one setting that the study gives it, so the comparison "
        "favors the rows that were searched."
    )
    found = f"Options were chosen by a search on validation parts, separately in each setting ({searched})."
    return (found + rest if fixed else found) if trials else ""


def _listed(labels: Sequence[str]) -> str:
    """Names of rows; those of a grid have commas themselves."""
    return ("; " if any("," in label for label in labels) else ", ").join(labels)


def _ranking_note(rows: Sequence[MeasuredRow], ranking: Ranking | None) -> str:
    """The methods that the ranking over settings leaves out; empty where it has all, or there is none."""
    found = [] if ranking is None else list(dict.fromkeys(row.label for row in rows if row.label not in ranking.labels))
    what = "Left out of the ranking, which is of methods with scores of one kind in every setting"
    return f"{what}: {_listed(found)}." if found else ""
