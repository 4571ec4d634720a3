"""Ranking of methods over settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pfl_lightning.report.rows import MeasuredRow, blocks

__all__ = ["Ranking", "not_ranked", "rank_rows"]


@dataclass(frozen=True)
class Ranking:
    """Ranks of the methods that every setting has, 1 the best; equal methods share the mean of their ranks.

    Attributes:
        settings: The settings.
        labels: The methods, best average rank first.
        ranks: Rank of each method in each setting, (methods, settings).
        averages: Average rank of each method.
        p_value: Of Friedman's test, that the methods do not differ; NaN of fewer than three methods or settings.
    """

    settings: tuple[str, ...]
    labels: tuple[str, ...]
    ranks: tuple[tuple[float, ...], ...]
    averages: tuple[float, ...]
    p_value: float


def rank_rows(rows: Sequence[MeasuredRow], figure: str) -> Ranking | None:
    """Rank methods by their mean over seeds; ``None`` where fewer than two settings or methods can be ranked.

    A setting with rows of several data sets counts with the largest block of equal data. Methods that a setting lacks
    are left out, and so are those whose scores are of another kind than the first one's; :func:`not_ranked` says which.

    Args:
        rows: The rows of all settings.
        figure: The figure that is ranked, such as ``"test"``.
    """
    means = {setting: found for setting, found in _means(rows, figure).items() if found}
    common = [row for row in dict.fromkeys(row.label for row in rows) if all(row in one for one in means.values())]
    if len(means) < 2 or len(common) < 2:
        return None
    from scipy import stats

    table = np.array([[-means[setting][label] for setting in means] for label in common]).round(12)
    ranks = stats.rankdata(table, axis=0)
    averages = ranks.mean(axis=1)
    order = np.argsort(averages, kind="stable")
    return Ranking(
        settings=tuple(means),
        labels=tuple(common[index] for index in order),
        ranks=tuple(tuple(map(float, ranks[index])) for index in order),
        averages=tuple(float(averages[index]) for index in order),
        p_value=_friedman(table),
    )


def _first_score(rows: Sequence[MeasuredRow], figure: str) -> str:
    return next((row.score(figure) for row in rows if row.runs), "")


def _means(rows: Sequence[MeasuredRow], figure: str) -> dict[str, dict[str, float]]:
    """What can be ranked: mean over seeds by setting and label."""
    score = _first_score(rows, figure)
    return {
        setting: {
            row.label: mean
            for row in some
            if row.score(figure) == score and not math.isnan(mean := row.headline(figure).mean)
        }
        for setting, some in _settings_of(rows).items()
    }


def _settings_of(rows: Sequence[MeasuredRow]) -> dict[str, list[MeasuredRow]]:
    """Rows by the study's setting; where its rows have other data, those of the largest block of equal data."""
    found: dict[str, list[MeasuredRow]] = {}
    for some in blocks(rows).values():
        setting = _setting(some[0])
        if sum(bool(row.runs) for row in some) > sum(bool(row.runs) for row in found.get(setting, [])):
            found[setting] = some
        found.setdefault(setting, some)
    return found


def _setting(row: MeasuredRow) -> str:
    return row.setting if row.of_setting is None else row.of_setting


def not_ranked(rows: Sequence[MeasuredRow], figure: str) -> list[str]:
    """Methods and settings that a ranking leaves out, each with the reason; none where there is one setting.

    Args:
        rows: The rows of all settings.
        figure: The figure that is ranked, such as ``"test"``.
    """
    means, score = _means(rows, figure), _first_score(rows, figure)
    if len(means) < 2:
        return []
    empty = [setting for setting, found in means.items() if not found]
    found = [f"the setting {setting} (it has no such figures)" for setting in empty]
    by_label: dict[str, dict[str, MeasuredRow]] = {}
    ranked = {id(row) for some in _settings_of(rows).values() for row in some}
    for row in sorted(rows, key=lambda row: id(row) in ranked):  # of several, the one that could be ranked
        by_label.setdefault(row.label, {})[_setting(row)] = row
    for label, of_label in by_label.items():
        lacking = [setting for setting in means if label not in means[setting] and setting not in empty]
        reasons: dict[str, list[str]] = {}
        for setting in lacking:
            mine = of_label.get(setting)
            other = mine is not None and mine.runs and id(mine) not in ranked
            reasons.setdefault("other data" if other else _reason(mine, figure, score), []).append(setting)
        said = ", ".join(f"{reason} in {' and '.join(names)}" for reason, names in reasons.items())
        found += [f"{label} ({said})"] if said else []
    return found


def _reason(row: MeasuredRow | None, figure: str, score: str) -> str:
    if row is None:
        return "no row"
    if not row.runs:
        return "no finished run"
    other = row.score(figure)
    return f"{other.replace('_', '-')} scores" if other != score else "no accuracies"


def _friedman(table: np.ndarray) -> float:
    from scipy import stats

    methods, settings = table.shape
    if methods < 3 or settings < 3:
        return math.nan
    if (table == table[0]).all():  # all methods equal
        return 1.0
    return float(stats.friedmanchisquare(*table).pvalue)
