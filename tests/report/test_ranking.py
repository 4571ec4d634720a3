"""Ranks over settings, against ranks by hand and Friedman's formula."""

import math

import numpy as np
import pytest
from _helpers.finished import write_run
from scipy import stats

from pfl_lightning.report import ReportSettings, Row, read_run
from pfl_lightning.report.grouping import apart_by_data, group_runs
from pfl_lightning.report.rows import measure
from pfl_lightning.report.significance import rank_rows


def rows(tmp_path, table):
    """A row of one run for each setting and label."""
    found = []
    for setting, accuracies in table.items():
        for label, value in accuracies.items():
            folder = write_run(tmp_path / setting / label, label, [value])
            found.append(Row(label, setting, (folder,)))
    return measure(found, ReportSettings("title"))


def test_ranks_and_friedmans_test_are_those_of_their_formulas(tmp_path):
    random = np.random.default_rng(0)
    labels, settings = ("a", "b", "c", "d"), ("s1", "s2", "s3", "s4", "s5")
    table = {setting: dict(zip(labels, random.permutation([0.1, 0.2, 0.3, 0.4]), strict=True)) for setting in settings}
    found = rank_rows(rows(tmp_path, table), "test")
    ranks = {a: [1 + sum(one[b] > one[a] for b in labels) for one in table.values()] for a in labels}
    assert sorted(found.labels) == sorted(labels)
    for label, average, some in zip(found.labels, found.averages, found.ranks, strict=True):
        assert list(some) == ranks[label]
        assert average == pytest.approx(np.mean(ranks[label]))
    assert list(found.averages) == sorted(found.averages)
    n, k = len(settings), len(labels)
    chi = 12 * n / (k * (k + 1)) * (sum(np.mean(r) ** 2 for r in ranks.values()) - k * (k + 1) ** 2 / 4)
    assert found.p_value == pytest.approx(stats.chi2.sf(chi, k - 1))


def test_equal_methods_share_their_ranks(tmp_path):
    found = rank_rows(rows(tmp_path, {name: {"a": 0.5, "b": 0.5, "c": 0.1} for name in "xyz"}), "test")
    assert found.averages == (1.5, 1.5, 3.0)
    same = rank_rows(rows(tmp_path / "same", {name: {"a": 0.5, "b": 0.5, "c": 0.5} for name in "xyz"}), "test")
    assert same.p_value == 1.0


def test_methods_that_a_setting_lacks_are_left_out(tmp_path):
    found = rank_rows(rows(tmp_path, {"x": {"a": 0.5, "b": 0.4, "c": 0.9}, "y": {"a": 0.5, "b": 0.6}}), "test")
    assert found.labels == ("a", "b")
    assert found.averages == (1.5, 1.5)
    assert math.isnan(found.p_value)  # two settings are too few
    assert rank_rows(rows(tmp_path / "1", {"x": {"a": 0.5, "b": 0.4}}), "test") is None


def test_methods_of_another_score_and_settings_without_results_are_left_out(tmp_path):
    found = rows(tmp_path, {"x": {"a": 0.5, "b": 0.4, "c": 0.9}, "y": {"a": 0.5, "b": 0.6}, "z": {"a": 0.1, "b": 0.2}})
    kind = {"score": "nearest_neighbor", "model": "aggregated"}
    neighbors = write_run(tmp_path / "n", "n", [0.9], evaluated=kind)
    more = [Row("n", "x", (neighbors,)), Row("c", "z", (), planned=2), Row("a", "empty", (), planned=2)]
    found += measure(more, ReportSettings("title"))
    ranking = rank_rows(found, "test")
    assert (ranking.labels, ranking.settings) == (("b", "a"), ("x", "y", "z"))


def test_a_row_of_other_data_is_not_ranked_and_the_others_are(tmp_path):
    found = []
    for setting, values in {"x": (0.5, 0.4, 0.9), "y": (0.5, 0.6, 0.9)}.items():
        for label, value in zip("abk", values, strict=True):
            config = {"data": {"class_path": "Digits", "init_args": {"public": 3000 if label == "k" else None}}}
            folder = write_run(tmp_path / setting / label, label, [value], config=config)
            found.append(Row(label, setting, (folder,)))
    found.append(Row("n", "y", (), planned=1))
    apart = apart_by_data(measure(found, ReportSettings("title")))
    assert [(row.setting, row.label) for row in apart] == [
        ("x: Digits, Dirichlet, public=null", "a"),
        ("x: Digits, Dirichlet, public=null", "b"),
        ("x: Digits, Dirichlet, public=3000", "k"),
        ("y: Digits, Dirichlet, public=null", "a"),
        ("y: Digits, Dirichlet, public=null", "b"),
        ("y: Digits, Dirichlet, public=3000", "k"),
        ("y: no finished run", "n"),
    ]
    ranking = rank_rows(apart, "test")
    assert (ranking.settings, ranking.labels, ranking.averages) == (("x", "y"), ("a", "b"), (1.5, 1.5))


def test_an_option_that_one_config_lacks_is_null(tmp_path):
    configs = ({"data": {"init_args": {"public": None}}}, {"data": {"init_args": {}}})
    folders = [write_run(tmp_path / f"{n}", f"m{n}", config=config) for n, config in enumerate(configs)]
    found = measure([Row(f"m{n}", "", (folder,)) for n, folder in enumerate(folders)], ReportSettings("title"))
    assert [row.setting for row in apart_by_data(found)] == ["", ""]
    assert [row.setting for row in group_runs(map(read_run, folders))] == ["", ""]
