"""Rules that take the place of an average, and bounds on norms, against a plain restatement."""

import math

import pytest
import torch

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from pfl_lightning.robust.rules import Entry, memory_of

COUNTS = [3, 1, 2, 5, 4]


def cohort():
    """Five updates of two tensors and a counter; the last lies."""
    generator = torch.Generator().manual_seed(1)
    sent = {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(4, generator=generator)}
    entries = []
    for client in range(5):
        moved = {
            n: t + torch.randn(t.shape, generator=generator) * (1e3 if client == 4 else 0.1) for n, t in sent.items()
        }
        weights = {**moved, "count": torch.tensor(10 + client)}
        update = ClientUpdate(client=client, round=0, num_samples=COUNTS[client], weights=weights)
        entries.append(Entry(update, Broadcast(client=client, round=0, weights={**sent, "count": torch.tensor(9)})))
    return entries


def flat(weights):
    return torch.cat([weights["a"].flatten(), weights["b"].flatten()]).double()


def result(rule, entries=None, refused=0):
    found = rule.judge(entries or cohort(), refused)
    assert all(torch.equal(one.weights["a"], found[0].weights["a"]) for one in found)
    assert [one.client for one in found] == [entry.update.client for entry in (entries or cohort())]
    return found[0].weights


def test_median():
    found = result(CoordinateMedian())
    rows = torch.stack([flat(entry.update.weights) for entry in cohort()])
    torch.testing.assert_close(flat(found), rows.median(0).values, rtol=1e-6, atol=1e-6)
    assert found["count"].item() == 12
    assert found["a"].dtype == torch.float32


@pytest.mark.parametrize(("refused", "trimmed"), [(0, 2), (1, 1), (2, 0), (5, 0)])
def test_trimmed_mean_of_those_who_may_still_lie(refused, trimmed):
    found = result(TrimmedMean(byzantine=2), refused=refused)
    rows = torch.stack([flat(entry.update.weights) for entry in cohort()]).sort(dim=0).values
    torch.testing.assert_close(flat(found), rows[trimmed : 5 - trimmed].mean(0), rtol=1e-6, atol=1e-4)


def test_geometric_median_is_that_of_whole_updates_by_samples():
    found = result(GeometricMedian(smoothing=0.01, steps=4))
    rows = torch.stack([flat(entry.update.weights) for entry in cohort()])
    shares = torch.tensor(COUNTS, dtype=torch.float64) / sum(COUNTS)
    v = shares @ rows
    for _ in range(4):
        beta = shares / (rows - v).norm(dim=1).clamp(min=0.01)
        v = beta @ rows / beta.sum()
    torch.testing.assert_close(flat(found), v, rtol=1e-3, atol=1e-3)
    assert found["count"].item() == 12


def test_centered_clipping_goes_from_what_was_sent():
    entries = cohort()
    found, start = result(CenteredClipping(radius=0.2), entries), flat(entries[0].sent.weights)
    steps = [flat(entry.update.weights) - start for entry in entries]
    expected = start + sum(step * min(1.0, 0.2 / float(step.norm())) for step in steps) / 5
    torch.testing.assert_close(flat(found), expected, rtol=1e-5, atol=1e-6)


def test_a_bound_scales_back_what_lies_farther():
    for entry in cohort():
        start, update = flat(entry.sent.weights), NormClipping(max_norm=0.5).bounded(*entry)
        before, after = flat(entry.update.weights) - start, flat(update.weights) - start
        assert after.norm() == pytest.approx(min(0.5, float(before.norm())), rel=1e-5)
        assert torch.dot(before, after) == pytest.approx(float(before.norm() * after.norm()), rel=1e-5)
        assert (update is entry.update) == (float(before.norm()) <= 0.5)
        assert update.weights["count"] is entry.update.weights["count"]


def test_rules_compose_with_a_bound():
    rule = GeometricMedian(max_norm=0.25)
    assert rule.bounded(*cohort()[4]) is not cohort()[4].update
    assert repr(rule) == "GeometricMedian(max_norm=0.25)"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NormClipping(0.0), "max_norm must be"),
        (lambda: TrimmedMean(-1), "byzantine must be at least 0"),
        (lambda: GeometricMedian(steps=0), "steps must be at least 1"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing must be"),
        (lambda: CenteredClipping(radius=-1.0), r"radius \(tau\) must be"),
        (lambda: MultiKrum(1, keep=0), "keep must be at least 1"),
        (lambda: MultiKrum(1, tolerance=-1.0), "tolerance must be"),
        (lambda: MultiKrum(1, max_norm=math.nan), "max_norm must be"),
    ],
)
def test_arguments_are_checked(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_the_memory_of_this_machine_is_known():
    assert memory_of(torch.device("cpu")) > 1e8
    assert memory_of(torch.device("meta")) == math.inf
