"""Figures over seeds against numpy, and what it takes to a target against a slow loop."""

import math

import numpy as np
import pytest
from _helpers.finished import write_run

from pfl_lightning.report import HistoryEntry, read_run
from pfl_lightning.report.curves import draw_curves
from pfl_lightning.report.rows import MeasuredRow, learning_curve, over_seeds, reach


@pytest.mark.parametrize("seeds", [1, 2, 7])
def test_mean_and_deviation_are_those_of_numpy(seeds):
    values = np.random.default_rng(seeds).random(seeds)
    found = over_seeds(values.tolist())
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.count, found.seeds) == (seeds, seeds)
    assert found.std == pytest.approx(np.std(values, ddof=1)) if seeds > 1 else math.isnan(found.std)


def test_a_figure_that_one_seed_does_not_know_has_no_mean():
    assert math.isnan(over_seeds([0.5, math.nan]).mean)
    assert math.isnan(over_seeds([]).mean)
    found = over_seeds([1.0, 3.0, math.inf])  # not reached: known
    assert (found.mean, found.count, found.seeds) == (2.0, 2, 3)
    assert over_seeds([math.inf]).count == 0


def test_what_it_takes_to_a_target_is_that_of_a_loop():
    random = np.random.default_rng(0)
    rounds = np.cumsum(random.integers(1, 4, size=20))
    entries = [HistoryEntry(int(r), 1, *(random.random(3) * 1e6), None, *random.random(2)) for r in rounds]
    for target in (0.3, 0.9, 0.99, 1.0):
        rounds, bytes, seconds, found = math.inf, 0.0, 0.0, False
        for entry in entries:
            bytes, seconds = bytes + entry.bytes_up + entry.bytes_down, seconds + entry.seconds
            if entry.test >= target:
                rounds, found = entry.round, True
                break
        reached = reach(entries, target)
        assert reached["rounds"] == rounds
        assert reached["megabytes"] == pytest.approx(bytes / 1e6 if found else math.inf)
        assert reached["seconds"] == pytest.approx(seconds if found else math.inf)


def test_a_mean_that_is_the_target_but_for_its_last_digit_reaches_it():
    shares = [53 / 60, 55 / 60, 57 / 60, 54 / 60, 54 / 60, 51 / 60]  # 324 of 360
    mean = sum(shares) / len(shares)
    assert mean < 0.9
    assert reach([HistoryEntry(1, test=mean)], 0.9)["rounds"] == 1
    assert reach([HistoryEntry(1, test=0.9 - 1 / 10_000_000)], 0.9)["rounds"] == math.inf


def test_rounds_without_an_evaluation_count_for_bytes():
    entries = [HistoryEntry(n, bytes_up=10**6, bytes_down=0, test=test) for n, test in ((1, None), (2, 0.5))]
    assert reach(entries, 0.5)["megabytes"] == 2.0
    assert math.isnan(reach([], 0.5)["rounds"])


def test_curves_hold_the_rounds_that_all_seeds_evaluated(tmp_path):
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed, curve=[0.1 + seed, 0.2, 0.4])) for seed in (0, 1)]
    whole = learning_curve(runs)
    assert [(round, size) for round, size, *_ in whole] == [(1, 4.0), (2, 8.0), (3, 12.0)]
    assert whole[0][3:] == pytest.approx((0.6, np.std([0.1, 1.1], ddof=1)))
    without = [{"round": n, "test": None if n == 2 else {"accuracy": 0.5}} for n in (1, 2, 3)]
    runs.append(read_run(write_run(tmp_path / "2", seed=2, curve=[0.1] * 3, history=without)))
    assert [round for round, *_ in learning_curve(runs)] == [1, 3]
    assert learning_curve([]) == []


def test_simulated_seconds_to_a_target_and_along_a_curve(tmp_path):
    entries = [HistoryEntry(n, test=0.1 * n, simulated_seconds=40.0 * n) for n in (1, 2, 3)]
    assert reach(entries, 0.2)["simulated_seconds"] == 80
    assert reach(entries, 0.9)["simulated_seconds"] == math.inf
    assert math.isnan(reach([HistoryEntry(1, test=0.1)], 0.9)["simulated_seconds"])  # no simulation: no column
    history = [{"round": n, "test": {"accuracy": 0.1 * n}, "simulated_seconds": 40.0 * n} for n in (1, 2)]
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed, curve=[0.1, 0.2], history=history)) for seed in (0, 1)]
    assert [point[2] for point in learning_curve(runs)] == [40, 80]
    plain = read_run(write_run(tmp_path / "2", seed=2, curve=[0.1, 0.2]))
    simulated, without = (MeasuredRow(name, "", tuple(own), 1) for name, own in (("a", runs), ("b", [plain])))
    panels = draw_curves([simulated, without]).axes
    assert [panel.get_xlabel() for panel in panels] == ["round", "MB up and down, all clients", "simulated seconds"]
    assert [len(panel.get_lines()) for panel in panels] == [2, 1, 1]
    assert panels[0].get_title() == "test accuracy by round"
    assert all(tick == int(tick) for tick in panels[0].get_xticks())  # of two rounds
    assert len(draw_curves([without]).axes) == 2
