"""What the files of results say: their parts, as they are written and as they are read."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pfl_lightning.metrics import EvalMetrics, summarize
from pfl_lightning.runs.config import is_below
from pfl_lightning.runs.files import damaged
from pfl_lightning.runs.folder import StudyPlace

FORMAT = 2
"""Number of the format of ``results.json``; see docs/results_format.md."""


CHOICES = ("last", "validation_selected", "best_test")
"""Rules that choose a round."""

FIGURES = {
    "test": "test accuracy",
    "personalized": "personalized accuracy",
    "personalized_novel": "accuracy of novel clients",
}
"""Figures of a run that a table can have as its headline, and what they are called."""


@dataclass(frozen=True)
class Source:
    """A data set or a partition.

    Attributes:
        name: Name of its class; empty where unknown.
        fingerprint: Hash of its content; empty where unknown.
    """

    name: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Accuracies of the clients, in [0, 1].

    Attributes:
        score: ``"classifier"``, ``"nearest_neighbor"`` (of features, without a head) or ``"metric"`` (no accuracy).
        model: ``"aggregated"``, ``"trained"`` or ``"fine_tuned"``; empty where unknown.
        mean: Mean over clients; NaN where there is none.
        std: Standard deviation over clients.
        worst_decile: Mean of the worst tenth of the clients.
        clients: Accuracy by client, as far as they are kept.
        round: After which round the model was evaluated; ``None`` where unknown.
    """

    score: str = "classifier"
    model: str = ""
    mean: float = math.nan
    std: float = math.nan
    worst_decile: float = math.nan
    clients: Mapping[int, float] = field(default_factory=dict)
    round: int | None = None


@dataclass(frozen=True)
class HistoryEntry:
    """A round that was run; seconds and bytes are those since the entry before.

    Attributes:
        round: Its number, from 1.
        clients: How many clients were evaluated after it; 0 for none.
        seconds: Wall time without the evaluation; ``None`` where it is not known, as in runs of earlier versions.
        bytes_up: Bytes that the clients uploaded, or ``None``.
        bytes_down: Bytes that the server sent, or ``None``.
        loss: Mean training loss over the clients of the round.
        test: Mean test accuracy over the evaluated clients.
        validation: Mean validation accuracy over the evaluated clients.
        further: Means of further metrics by name, by part (``"test"``, ``"validation"``).
        simulated_seconds: Simulated seconds from the start of the run to its end; ``None`` where nothing is simulated.
    """

    round: int
    clients: int = 0
    seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    loss: float | None = None
    test: float | None = None
    validation: float | None = None
    further: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    simulated_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The form of ``results.json``."""
        parts, found = {"test": self.test, "validation": self.validation}, asdict(self)
        further, simulated = found.pop("further"), found.pop("simulated_seconds")
        found |= {} if simulated is None else {"simulated_seconds": simulated}
        means = {
            part: None if mean is None else {"accuracy": mean, **further.get(part, {})} for part, mean in parts.items()
        }
        return {**found, **means}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], metric: str = "accuracy") -> HistoryEntry:
        """The entry in this form, with the means of a metric as accuracies; a version may have written less."""
        means: dict[str, Any] = {part: (entry.get(part) or {}).get(metric) for part in ("test", "validation")}
        names = ("seconds", "bytes_up", "bytes_down", "loss", "simulated_seconds")
        known: dict[str, Any] = {name: entry.get(name) for name in names}
        return cls(round=int(entry["round"]), clients=int(entry.get("clients") or 0), **known, **means)


Values = dict[str, dict[int, float]]
"""Values of single clients by metric."""


@dataclass
class ChosenRound:
    """A round that was chosen by some rule, and every client's accuracies in it.

    Attributes:
        round: Its number, from 1.
        criterion: What the rule has compared.
        validation: Accuracies on the validation parts, by client.
        test: Accuracies on the test parts, by client.
        further: Further metrics by part, name and client.
    """

    round: int
    criterion: float
    validation: dict[int, float]
    test: dict[int, float]
    further: dict[str, Values] = field(default_factory=dict)

    def values(self, part: str, metric: str = "accuracy") -> dict[int, float]:
        """A metric on a part, by client; empty where there is none."""
        own: dict[int, float] = getattr(self, part)
        return own if metric == "accuracy" else self.further.get(part, {}).get(metric, {})

    def as_dict(
        self, samples: Mapping[str, Mapping[int, int]], metric: str = "accuracy", lower_is_better: bool = False
    ) -> dict[str, Any]:
        """The form of ``results.json``, of a metric.

        Args:
            samples: Numbers of the clients' samples, by part.
            metric: Name of the metric.
            lower_is_better: Whether the best client has the lowest value.
        """
        parts = ("test", "validation")
        found = {part: summary_of(self.values(part, metric), samples[part], lower_is_better) for part in parts}
        return {"round": self.round, **found}


@dataclass(frozen=True)
class FinishedRun:
    """Results of a run, read from its folder.

    Attributes:
        path: The folder.
        method: Name of the method's class.
        finished: Whether all its rounds are done.
        data: Its data set.
        partition: How that was divided among clients.
        config: The resolved config; empty where the run has none.
        options: What tells its configuration from others, by path, without seeds and places.
        seed: The seed of everything.
        data_seeds: The seeds of splits and partition.
        seeds: All its seeds.
        rounds: Communication rounds that are done.
        num_clients: Number of clients, novel ones included.
        never_trained: Clients that could take part in rounds and trained in none, as far as the run has counted.
        test: Test accuracies in the chosen round.
        personalized: Those after the personalization stage; NaN where there was none.
        personalized_novel: The same of clients that never trained.
        personalization: What the clients have adapted, and how, as options by path; empty where there was none.
        bytes_up: Bytes that all clients uploaded.
        bytes_down: Bytes that the server sent.
        seconds_per_round: Wall time of a round without its evaluation; NaN where unknown.
        history: The evaluated rounds, in order.
        versions: Versions of the packages, by name.
        place: What a study calls it; ``None`` for a run that is none of a study.
        metric: What is called accuracy here, where it is another metric.
        lower_is_better: Whether the best client has the lowest value of it.
    """

    path: Path
    method: str
    finished: bool = True
    data: Source = Source()
    partition: Source = Source()
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    data_seeds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    rounds: int = 0
    num_clients: int = 0
    never_trained: tuple[int, ...] = ()
    test: Evaluation = Evaluation()
    personalized: Evaluation = Evaluation()
    personalized_novel: Evaluation = Evaluation()
    personalization: Mapping[str, Any] = field(default_factory=dict)
    bytes_up: float = math.nan
    bytes_down: float = math.nan
    seconds_per_round: float = math.nan
    history: tuple[HistoryEntry, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    place: StudyPlace | None = None
    metric: str = "accuracy"
    lower_is_better: bool = False

    def evaluation(self, figure: str) -> Evaluation:
        """The accuracies of a figure: ``"test"``, ``"personalized"`` or ``"personalized_novel"``."""
        found: Evaluation = getattr(self, figure)
        return found

    def compared_by(self, figure: str) -> FinishedRun:
        """The run with the options that make a figure: personalized accuracies have those of the personalization.

        That may have been another one than the config's: ``pfl personalize`` takes options of its own.
        """
        if figure == "test" or not self.personalization:
            return self
        kept = {path: value for path, value in self.options.items() if not is_below(path, "personalize")}
        return replace(self, options=kept | dict(self.personalization))


ROUNDING = 1e-6
"""By how much the mean of a file of clients may be off the one in the file of results."""


def client_accuracies(
    path: Path, column: str, summary: Mapping[str, Any], novel: str | None = None, trained: bool = False
) -> dict[int, float]:
    """Accuracies by client; none where there is no such file.

    Args:
        path: A file with a row for each client.
        column: Name of the accuracies.
        summary: Number and mean of the accuracies, as the file of results has them, which must be those of the rows.
        novel: ``"1"`` for novel clients, ``"0"`` for the others, ``None`` for all.
        trained: Whether clients that never trained are left out.

    Raises:
        ConfigurationError: The file is cut, or has other clients or accuracies than those of the summary.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if novel is None or row["novel"] == novel]
        rows = [row for row in rows if not trained or row["rounds_trained"] != "0"]
        found = {int(row["client"]): float(row[column]) for row in rows if row.get(column)}
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        raise damaged(path, error) from error
    number, mean = summary.get("num_clients", len(found)), summary.get("mean")
    if mean is not None and len(found) != number:
        raise damaged(path, f"it has accuracies of {len(found)} clients, the results are of {number}")
    if mean is not None and found and abs(fmean(found.values()) - mean) > ROUNDING:  # not of NaN
        why = f"the mean of its accuracies is {fmean(found.values()):.6g}, that of the results {mean:.6g}"
        raise damaged(path, why)
    return {client: accuracy for client, accuracy in found.items() if math.isfinite(accuracy)}


def values_by_metric(scores: Mapping[int, EvalMetrics]) -> Values:
    """Accuracy and further metrics of every client for which they are defined: a regression has no accuracy."""
    names = dict.fromkeys(name for score in scores.values() for name in score.further)
    found = {name: {c: score.further[name] for c, score in scores.items() if name in score.further} for name in names}
    found = {"accuracy": {client: score.accuracy for client, score in scores.items()}, **found}
    return {name: {c: value for c, value in own.items() if not math.isnan(value)} for name, own in found.items()}


def as_text(content: Mapping[str, Any]) -> str:
    """A file's text; JSON has no NaN, so that none may be in it."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def csv_text(rows: Iterable[Iterable[Any]], end: str = "\r\n") -> str:
    """Rows as a file's text; NaN is an empty field, and text that a spreadsheet would execute begins with a quote."""

    def cell(value: Any) -> Any:
        if value != value:
            return ""
        return f"'{value}" if isinstance(value, str) and len(value) > 1 and value[0] in "=+-@\t\r" else value

    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator=end)
    writer.writerows([cell(value) for value in row] for row in rows)
    return file.getvalue()


def with_names(rows: Sequence[Sequence[Any]], data: Any) -> list[list[Any]]:
    """Rows of clients with a column ``name`` after ``client``, where the data have names.

    Args:
        rows: A header, then a row for each client, each beginning with its number.
        data: The data module.
    """
    names = getattr(data, "client_names", None)
    head, *rest = [list(row) for row in rows]
    return [head, *rest] if not names else [[head[0], "name", *head[1:]], *([k, names[k], *own] for k, *own in rest)]


def summary_of(
    values: Mapping[int, float], samples: Mapping[int, int], lower_is_better: bool = False
) -> dict[str, float | int | None] | None:
    """Means, spread and extremes of a metric over clients; ``None`` without clients.

    Args:
        values: Of each client.
        samples: Numbers of their samples.
        lower_is_better: Whether the best client has the lowest value.
    """
    if not values:
        return None
    found = summarize(values, samples, lower_is_better)
    figures = {**found.as_dict(), "variance": found.std**2, "num_clients": len(values)}
    return {name: None if math.isnan(figure) else figure for name, figure in figures.items()}


def number_of(value: Any) -> float:
    """A number as it was read; NaN for none."""
    return math.nan if value is None else float(value)
