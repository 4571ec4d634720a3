"""Whether methods differ by more than chance: paired tests with Holm's correction, and ranks over settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pfl_lightning.report.rows import MeasuredRow, blocks
from pfl_lightning.runs.results import FinishedRun

CAVEAT = (
    "p values: two-sided, of a paired t-test over seeds (the clients' mean of each seed; one degree of freedom less "
    "than pairs) and of Wilcoxon's signed-rank test over clients (paired by client and partition; seeds of one "
    "partition are averaged first; equal pairs are left out); each by Holm's correction for the rows it tests. A "
    "small value means that a difference this large is unlikely by chance. Read them with care: with few seeds the "
    "t-test detects large differences only; clients of a run share a model and its training, so the test over clients "
    "assumes more independence than there is, and its values are too small; a reference chosen because it is best "
    "makes both too small. Runs of one partition say nothing about other partitions or data."
)
"""What the p values mean; every report prints it."""


LARGEST_EXACT = 100
"""Pairs up to which the signed-rank test is exact; beyond, it is the normal approximation."""


@dataclass(frozen=True)
class PairedTests:
    """A row against the reference.

    Attributes:
        label: The row.
        reference: The row that it is compared with.
        difference: Mean over the paired seeds of the row's accuracy minus the reference's; NaN without pairs.
        seeds: Number of paired seeds.
        clients: Number of pairs of clients; a client of one partition counts once, whatever the number of seeds.
        p_seeds: p value of the paired t-test over seeds, corrected; NaN with fewer than two.
        p_clients: p value of Wilcoxon's signed-rank test over clients, corrected; NaN without pairs.
    """

    label: str
    reference: str
    difference: float
    seeds: int
    clients: int
    p_seeds: float
    p_clients: float


def paired_t_test(differences: ArrayLike) -> float:
    """Two-sided p value of the mean difference of pairs being 0; NaN of fewer than two pairs, or without spread.

    Pairs that are all equal have the p value 1.

    Example:
        >>> round(paired_t_test([0.01, 0.02, 0.03]), 4)
        0.0742
    """
    from scipy import stats

    values = np.asarray(differences, dtype=np.float64).round(12)  # what is left of rounding is no spread
    if len(values) < 2:
        return math.nan
    if not values.any():
        return 1.0
    if np.ptp(values) <= 1e-12:  # no spread: t would be infinite
        return math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def signed_rank_test(differences: ArrayLike) -> float:
    """Two-sided p value of Wilcoxon's signed-rank test; pairs without difference are left out.

    It is exact up to 100 pairs, ties included.

    Example:
        >>> signed_rank_test([0.1, 0.2, 0.3, 0.4, 0.5])  # 2 of the 2^5 signs are as extreme
        0.0625
    """
    from scipy import stats

    values = np.asarray(differences, dtype=np.float64).round(12)  # equal differences are ties
    if not len(values):
        return math.nan
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(values) > LARGEST_EXACT:
        return float(stats.wilcoxon(values, method="approx").pvalue)
    # Share of all signs whose sum of positive ranks is as far from its middle; also right with ties.
    doubled = (2 * stats.rankdata(np.abs(values))).round().astype(int)  # shared ranks are halves
    chances = np.zeros(doubled.sum() + 1)  # of each sum, every sign being as likely
    chances[0] = 1.0
    for rank in doubled:
        chances[rank:] = (chances[rank:] + chances[: len(chances) - rank]) / 2  # the right side is made first
        chances[:rank] /= 2
    middle = doubled.sum() / 2
    seen = abs(doubled[values > 0].sum() - middle)
    return float(min(1.0, chances[np.abs(np.arange(len(chances)) - middle) >= seen].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p values of several tests by Holm's step-down correction; NaN stays, and does not count as a test.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    tests = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    found, highest = [math.nan] * len(p_values), 0.0
    for done, (p, index) in enumerate(tests):
        highest = max(highest, min(1.0, p * (len(tests) - done)))
        found[index] = highest
    return found


def compare_with_reference(rows: Sequence[MeasuredRow], figure: str, reference: str = "") -> list[PairedTests]:
    """Compare each row of a block with a reference, for every score apart.

    Args:
        rows: The rows of a block.
        figure: The figure that is compared, such as ``"test"``.
        reference: Label of the reference; the row of the best mean if no row has this label.
    """
    found = []
    for score in dict.fromkeys(row.score(figure) for row in rows):
        some = [row for row in rows if row.runs and row.score(figure) == score]
        some = [row for row in some if not math.isnan(row.headline(figure).mean)]
        if len(some) > 1:
            best = max(some, key=lambda row: row.sign * row.headline(figure).mean)
            chosen = next((row for row in some if row.label == reference), best)
            found += _against([row for row in some if row is not chosen], chosen, figure)
    return found


def _against(rows: Sequence[MeasuredRow], reference: MeasuredRow, figure: str) -> list[PairedTests]:
    raw = []
    for row in rows:
        pairs = _pairs(row.runs, reference.runs)
        by_seed = [a.evaluation(figure).mean - b.evaluation(figure).mean for a, b in pairs]
        by_client = _client_differences(pairs, figure)
        raw.append((row, by_seed, by_client, paired_t_test(by_seed), signed_rank_test(by_client)))
    seeds, clients = holm([entry[3] for entry in raw]), holm([entry[4] for entry in raw])
    found = []
    for (row, by_seed, by_client, *_), *p_values in zip(raw, seeds, clients, strict=True):
        mean = float(np.mean(by_seed)) if by_seed else math.nan
        found.append(PairedTests(row.label, reference.label, mean, len(by_seed), len(by_client), *p_values))
    return found


def _pairs(runs: Sequence[FinishedRun], others: Sequence[FinishedRun]) -> list[tuple[FinishedRun, FinishedRun]]:
    """Runs of the same seeds; then those of the same first seed and partition; then those of the same first seed.

    A run is in one pair at most, and in one by what both have alone: which of several belong together is not guessed.
    """
    found: list[tuple[FinishedRun, FinishedRun]] = []
    keys: tuple[Callable[[FinishedRun], object], ...] = (
        lambda run: run.seeds,
        lambda run: (run.seed, *_partition(run)),
        lambda run: run.seed,
    )
    for key in keys:
        paired = {id(run) for pair in found for run in pair}
        ours, theirs = ([run for run in some if id(run) not in paired] for some in (runs, others))
        times = Counter(map(key, ours)), Counter(map(key, theirs))
        alone = [(run, other) for run in ours for other in theirs if key(run) == key(other)]
        found += [pair for pair in alone if all(some[key(pair[0])] == 1 for some in times)]
    return sorted(found, key=lambda pair: [id(run) for run in runs].index(id(pair[0])))


def _partition(run: FinishedRun) -> tuple[object, object]:
    return run.data.fingerprint, run.partition.fingerprint or run.data_seeds


def _same_partition(run: FinishedRun, other: FinishedRun) -> bool:
    """By the fingerprints of data and partition; where these are not known, by their seeds."""
    if run.data.fingerprint and other.data.fingerprint and run.data.fingerprint != other.data.fingerprint:
        return False
    one, another = run.partition.fingerprint, other.partition.fingerprint
    return one == another if one and another else run.data_seeds == other.data_seeds


def _client_differences(pairs: Sequence[tuple[FinishedRun, FinishedRun]], figure: str) -> list[float]:
    """Differences of the clients that both runs of a pair have, if these are of the same partition.

    Of several seeds of one partition a client has the mean difference: its data is the same, and counting it once for
    each seed would take what depends on that data for so many independent observations.
    """
    found: dict[tuple[object, int], list[float]] = {}
    for run, other in pairs:
        if not _same_partition(run, other):
            continue
        ours, theirs = run.evaluation(figure).clients, other.evaluation(figure).clients
        for client in sorted(ours.keys() & theirs.keys()):
            found.setdefault((_partition(run), client), []).append(ours[client] - theirs[client])
    return [math.fsum(values) / len(values) for values in found.values()]


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
    are left out, and so are those whose scores are of another kind than the first one's.

    Args:
        rows: The rows of all settings.
        figure: The figure that is ranked, such as ``"test"``.
    """
    score = next((row.score(figure) for row in rows if row.runs), "")
    means: dict[str, dict[str, float]] = {}
    largest: dict[str, list[MeasuredRow]] = {}
    for some in blocks(rows).values():
        setting = some[0].setting if some[0].of_setting is None else some[0].of_setting
        done = [row for row in some if row.runs]
        if len(done) > len(largest.get(setting, [])):
            largest[setting] = done
    for setting, some in largest.items():
        found = {row.label: row.sign * row.headline(figure).mean for row in some if row.score(figure) == score}
        if known := {label: mean for label, mean in found.items() if not math.isnan(mean)}:
            means[setting] = known
    common = [row for row in dict.fromkeys(row.label for row in rows) if all(row in one for one in means.values())]
    if len(means) < 2 or len(common) < 2:
        return None
    from scipy import stats

    table = np.array([[-means[setting][label] for setting in means] for label in common]).round(12)
    ranks = stats.rankdata(table, axis=0)
    averages = ranks.mean(axis=1)
    order = np.argsort(averages, kind="stable")
    labels = tuple(common[index] for index in order)
    sorted_ranks = tuple(tuple(map(float, ranks[index])) for index in order)
    p_value = math.nan
    if (table == table[0]).all() and min(table.shape) >= 3:  # all methods equal
        p_value = 1.0
    elif min(table.shape) >= 3:
        p_value = float(stats.friedmanchisquare(*table).pvalue)
    return Ranking(tuple(means), labels, sorted_ranks, tuple(map(float, averages[order])), p_value)
