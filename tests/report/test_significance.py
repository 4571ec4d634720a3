"""Paired tests against scipy's two-sample forms, enumeration and closed forms; pairs of seeds and clients."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from _helpers.finished import write_run
from scipy import stats

from pfl_lightning.report import ReportSettings, Row
from pfl_lightning.report.rows import measure
from pfl_lightning.report.significance import _pairs, compare_with_reference, holm, paired_t_test, signed_rank_test
from pfl_lightning.runs.results import FinishedRun


@pytest.mark.parametrize("pairs", [2, 3, 10])
def test_the_t_test_is_that_of_pairs(pairs):
    one, other = np.random.default_rng(pairs).random((2, pairs))
    assert paired_t_test(one - other) == pytest.approx(stats.ttest_rel(one, other).pvalue)
    t = (one - other).mean() / ((one - other).std(ddof=1) / math.sqrt(pairs))
    assert paired_t_test(one - other) == pytest.approx(2 * stats.t.sf(abs(t), pairs - 1))


def test_the_t_test_of_few_or_equal_differences():
    assert math.isnan(paired_t_test([0.1]))
    assert paired_t_test([0.0, 0.0]) == 1.0
    assert math.isnan(paired_t_test([0.1, 0.1, 0.1]))  # no spread to judge by
    clients = [np.linspace(0.5, 0.9, 100) + seed / 7 for seed in range(3)]  # one more right answer of 100, each time
    rounded = [np.mean([*values[:-1], values[-1] + 0.01]) - np.mean(values) for values in clients]
    assert np.ptp(rounded) > 0
    assert math.isnan(paired_t_test(rounded))


@pytest.mark.parametrize("digits", [1, 9], ids=["tied", "distinct"])
@pytest.mark.parametrize("number", [1, 4, 9])
def test_the_signed_rank_test_counts_signs(number, digits):
    """Of all signs that the ranks may have: the share whose sum is as far from its middle."""
    values = np.random.default_rng(number).normal(0.3, 1, number).round(digits)
    ranks = stats.rankdata(np.abs(values))
    seen = abs(ranks[values > 0].sum() - ranks.sum() / 2)
    sums = [sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign) for signs in _signs(number)]
    expected = np.mean([abs(total - ranks.sum() / 2) >= seen - 1e-9 for total in sums])
    assert signed_rank_test(values) == pytest.approx(expected)
    if digits > 1:
        assert signed_rank_test([*values, 0.0]) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)


def _signs(number):
    return itertools.product((False, True), repeat=number)


def test_the_signed_rank_test_of_many_pairs_is_scipys_approximation():
    many = np.random.default_rng(0).normal(0.1, 1, 200)
    assert signed_rank_test(many) == pytest.approx(stats.wilcoxon(many, method="approx").pvalue)
    some = many[:100]  # exact, and close to it
    assert signed_rank_test(some) == pytest.approx(stats.wilcoxon(some, method="approx").pvalue, abs=0.01)
    assert signed_rank_test([0.0, 0.0]) == 1.0
    assert math.isnan(signed_rank_test([]))


def test_holms_correction_is_that_of_its_definition():
    values = np.random.default_rng(1).random(6) / 5
    found = holm(values.tolist())
    order = np.argsort(values)
    for position, index in enumerate(order):
        expected = max(min(1.0, values[order[i]] * (6 - i)) for i in range(position + 1))
        assert found[index] == pytest.approx(expected)
    assert holm([0.01, math.nan, 0.02])[::2] == pytest.approx([0.02, 0.02])
    assert holm([]) == []


def rows(tmp_path, accuracies, **changes):
    """A row of two runs for each label."""
    found = []
    for label, seeds in accuracies.items():
        one = {"partition": {"name": "Dirichlet", "fingerprint": changes.get(label, "")}} if label in changes else {}
        folders = [write_run(tmp_path / label / str(s), label, clients, seed=s, **one) for s, clients in seeds.items()]
        found.append(Row(label, "", tuple(folders)))
    return measure(found, ReportSettings("title"))


def test_methods_are_compared_over_common_seeds_and_clients(tmp_path):
    best = {0: [0.9, 0.8, 0.95], 1: [0.85, 0.9, 0.7], 2: [0.99, 0.99, 0.99]}
    other = {0: [0.5, 0.6, 0.4], 1: [0.6, 0.7, 0.8]}
    third = {0: [0.85, 0.7, 0.9], 1: [0.8, 0.85, 0.6], 2: [0.9, 0.95, 0.9]}
    found = compare_with_reference(rows(tmp_path, {"other": other, "best": best, "third": third}), "test")
    assert [(t.label, t.reference, t.seeds, t.clients) for t in found] == [
        ("other", "best", 2, 6),
        ("third", "best", 3, 9),
    ]
    differences = [np.subtract(other[s], best[s]) for s in (0, 1)]
    assert found[0].difference == pytest.approx(np.mean([d.mean() for d in differences]))
    raw = [
        [paired_t_test([d.mean() for d in differences]), signed_rank_test(np.concatenate(differences))],
        [
            paired_t_test([np.mean(third[s]) - np.mean(best[s]) for s in range(3)]),
            signed_rank_test(np.concatenate([np.subtract(third[s], best[s]) for s in range(3)])),
        ],
    ]
    assert [t.p_seeds for t in found] == pytest.approx(holm([raw[0][0], raw[1][0]]))
    assert [t.p_clients for t in found] == pytest.approx(holm([raw[0][1], raw[1][1]]))


def test_a_chosen_reference_replaces_the_best(tmp_path):
    found = rows(tmp_path, {"low": {0: [0.1, 0.2]}, "high": {0: [0.8, 0.9]}})
    (test,) = compare_with_reference(found, "test", "low")
    assert (test.label, test.reference) == ("high", "low")
    assert test.difference == pytest.approx(0.7)
    assert math.isnan(test.p_seeds)
    assert test.p_clients == pytest.approx(0.5)  # two of four signs


def test_a_client_of_one_partition_is_one_pair_whatever_the_number_of_seeds(tmp_path):
    """Its data is the same: three seeds are no three clients."""
    one = {0: [0.5, 0.6, 0.7, 0.8], 1: [0.4, 0.7, 0.7, 0.9], 2: [0.6, 0.5, 0.7, 0.6]}
    other = {seed: [value + 0.1 for value in values] for seed, values in one.items()}
    found = rows(tmp_path, {"one": one, "other": other}, one="sha256:x", other="sha256:x")
    (test,) = compare_with_reference(found, "test")
    assert (test.seeds, test.clients) == (3, 4)
    assert test.p_clients == pytest.approx(2 / 2**4)


def test_clients_of_other_partitions_are_no_pairs(tmp_path):
    found = rows(tmp_path, {"a": {0: [0.1, 0.2]}, "b": {0: [0.8, 0.9]}}, a="sha256:x", b="sha256:y")
    (test,) = compare_with_reference(found, "test")
    assert (test.seeds, test.clients) == (1, 0)
    assert math.isnan(test.p_clients)


def test_clients_of_other_data_are_no_pairs(tmp_path):
    """Indices alone make a partition: two data sets of one size are divided alike."""
    folders = {}
    for label, value in (("a", 0.1), ("b", 0.5)):
        for seed, data in ((0, "x"), (1, "y"), (2, label)):
            source = {"data": {"name": "ImageFolder", "fingerprint": data}, "partition": {"fingerprint": "one"}}
            folder = tmp_path / label / str(seed)
            folders.setdefault(label, []).append(
                write_run(folder, label, [value, value + seed / 8], seed=seed, **source)
            )
    found = measure([Row(label, "", tuple(some)) for label, some in folders.items()], ReportSettings("title"))
    (test,) = compare_with_reference(found, "test")
    assert (test.seeds, test.clients) == (3, 4)  # two clients of x, two of y


def test_a_seed_with_several_partitions_is_paired_by_the_partition(tmp_path):
    found = []
    for label, value in (("a", 0.1), ("b", 0.5)):
        folders = []
        for number in (0, 1) if label == "a" else (1, 0):
            source = {"name": "Dirichlet", "fingerprint": f"sha256:{number}"}
            folder = tmp_path / label / str(number)
            folders.append(write_run(folder, label, [value, value + number / 4], partition=source))
        found.append(Row(label, "", tuple(folders)))
    (test,) = compare_with_reference(measure(found, ReportSettings("title")), "test")
    assert (test.seeds, test.clients) == (2, 4)
    assert test.difference == pytest.approx(-0.4)
    assert test.p_clients == pytest.approx(2 / 16)  # all four differences are equal


def test_scores_of_another_kind_are_never_compared(tmp_path):
    found = rows(tmp_path, {"a": {0: [0.1, 0.2]}, "b": {0: [0.8, 0.9]}})
    kind = {"score": "nearest_neighbor", "model": "aggregated"}
    folder = write_run(tmp_path / "c", "Calibre", [0.95, 0.95], evaluated=kind)
    found += measure([Row("c", "", (folder,))], ReportSettings("title"))
    assert [(t.label, t.reference) for t in compare_with_reference(found, "test")] == [("a", "b")]


def test_runs_are_paired_by_all_their_seeds_first():
    """Else only where no two runs could be meant."""

    def run(*seeds):
        return FinishedRun(Path("run"), "FedAvg", seed=0, seeds=seeds)

    ours, theirs = [run(0, 1), run(0, 2)], [run(0, 2), run(0, 1)]
    assert _pairs(ours, theirs) == [(ours[0], theirs[1]), (ours[1], theirs[0])]
    assert _pairs([run(0, 3)], theirs) == []
    assert len(_pairs([run(0, 3)], theirs[:1])) == 1


def test_a_run_is_in_one_pair_at_most():
    """One run of the reference beside several of its seed would count as often as there are."""

    def run(data_seed):
        return FinishedRun(Path("run"), "FedAvg", seed=0, data_seeds=(data_seed,), seeds=(0, data_seed))

    ours, theirs = [run(0), run(1), run(2)], [run(0)]
    assert _pairs(ours, theirs) == [(ours[0], theirs[0])]
    assert _pairs(theirs, ours) == [(theirs[0], ours[0])]
    assert _pairs(ours, [run(5)]) == []
