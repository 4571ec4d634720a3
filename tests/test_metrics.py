"""Summaries over clients."""

import numpy as np
import pytest

from pfl_lightning.metrics import summarize


@pytest.mark.parametrize(("clients", "in_decile"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (95, 10), (100, 10)])
def test_against_numpy(clients, in_decile):
    rng = np.random.default_rng(clients)
    numbers, values = rng.permutation(1000)[:clients], rng.random(clients)
    samples = rng.integers(1, 50, clients)
    got = summarize(dict(zip(numbers.tolist(), values.tolist(), strict=True)), dict(zip(numbers, samples, strict=True)))
    assert got.weighted_mean == pytest.approx(np.sum(values * samples) / np.sum(samples))
    assert got.mean == pytest.approx(np.mean(values))
    assert got.std == pytest.approx(np.std(values, ddof=0))
    assert got.worst_decile == pytest.approx(sum(sorted(values)[:in_decile]) / in_decile)
    assert (got.best, got.worst) == (max(values), min(values))
    by_client = dict(zip(numbers.tolist(), values, strict=True))
    assert by_client[got.best_client] == got.best
    assert by_client[got.worst_client] == got.worst
    assert all(type(value) in (int, float) for value in got.as_dict().values())


def test_nobody():
    with pytest.raises(ValueError, match="no client"):
        summarize({})


def test_the_best_client_may_have_the_lowest_value():
    got = summarize({4: 0.3, 7: 0.1, 9: 0.2}, lower_is_better=True)
    assert (got.best, got.best_client, got.worst, got.worst_client, got.worst_decile) == (0.1, 7, 0.3, 4, 0.3)
    assert np.isnan(got.weighted_mean)
