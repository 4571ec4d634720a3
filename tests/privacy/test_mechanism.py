"""Noise, cohorts and the adaptive bound by their distributions; an attack that knows all but one client."""

import math

import numpy as np
import pytest
import torch
from _helpers.privacy import CLIENTS, METHODS, an_update, make
from scipy.stats import chi2

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.privacy import ClientPrivacy


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PFL_PRIVACY_SEED", "17")


def is_variance(values, deviation):
    """Whether the sum of squares is within the middle 99.8 % of its distribution."""
    return 0.001 < chi2.cdf(float((values / deviation).square().sum()), values.numel()) < 0.999


@pytest.mark.parametrize("name", METHODS)
def test_noise_has_the_variance_that_the_budget_asks_for(name, monkeypatch):
    """Of an empty cohort, every sum is noise alone."""
    mechanism, server = make(name, noise_multiplier=0.8, clip_norm=0.7, class_norm=0.4)
    seen = []
    monkeypatch.setattr("pfl_lightning.privacy.mechanism.mean_update", lambda *given: seen.append(dict(given[3])))
    for _ in range(60):
        mechanism.release(server, server.broadcast(0, 0))
    kinds = mechanism.layout.bounds(0.7, 0.4)
    for kind, bound in kinds.items():
        drawn = [t.flatten() for sums in seen for key, t in sums.items() if key.partition(".")[0] == kind]
        assert is_variance(torch.cat(drawn), 0.8 * math.sqrt(len(kinds)) * bound), kind
    assert mechanism.rounds == 60


def test_noise_differs_from_round_to_round_and_from_seed_to_seed(monkeypatch):
    def first(times=1):
        mechanism, server = make()
        return [mechanism.release(server, server.broadcast(0, 0)).weights["head.bias"] for _ in range(times)]

    one, two = first(2)
    assert torch.equal(one, first()[0])
    assert not torch.equal(one, two)
    monkeypatch.setenv("PFL_PRIVACY_SEED", "18")
    assert not torch.equal(one, first()[0])
    monkeypatch.delenv("PFL_PRIVACY_SEED")
    assert not torch.equal(first()[0], first()[0])


def test_clients_take_part_each_by_its_own_draw():
    mechanism, server = make()
    drawn = np.zeros((400, CLIENTS))
    for round in drawn:
        round[mechanism.sample(0.3)] = 1
        assert mechanism.sample(0.3) == np.flatnonzero(round).tolist()  # until the round is over
        mechanism.release(server, server.broadcast(0, 0))
    assert abs(drawn.mean() - 0.3) < 4 * math.sqrt(0.21 / drawn.size)
    assert abs(drawn.sum(1).var() - CLIENTS * 0.21) < 1.0  # binomial, and no fixed number
    assert mechanism.expected == pytest.approx(6)
    mechanism.sample(5 / mechanism.num_clients)
    assert mechanism.rate == 0.25


def test_the_adaptive_bound_finds_the_quantile():
    """Norms of updates are 1, 2, ..., 20: half of them are at most 10 or so (Andrew et al., 2021)."""
    mechanism, server = make(quantile=0.5, noise_multiplier=0.5)
    sent = server.broadcast(0, 0)
    direction = {n: torch.ones_like(w) for n, w in sent.weights.items()}
    norm = math.sqrt(sum(d.numel() for d in direction.values()))
    found = []
    for _ in range(60):
        for client in range(CLIENTS):
            weights = {n: w + (client + 1) / norm * direction[n] for n, w in sent.weights.items()}
            mechanism.add(ClientUpdate(client=client, round=0, num_samples=1, weights=weights), sent)
        mechanism.release(server, sent)
        found.append(mechanism.clip_norm)
    assert found[0] < 1.3
    assert all(8 < clip < 13 for clip in found[-10:])


def test_a_bound_that_adapts_takes_part_of_the_budget():
    fixed, adaptive = make()[0], make(quantile=0.5)[0]
    assert fixed.multiplier() == pytest.approx(1)
    counted = max(CLIENTS / 20, 1.0)
    assert adaptive.multiplier() ** -2 + (2 * counted) ** -2 == pytest.approx(1)
    assert make("FedPAC")[0].multiplier() == pytest.approx(math.sqrt(3))  # weights, presence, centroids


def test_a_membership_inference_attack_weakens_with_epsilon():
    """It knows every update but that of one client, and tells by the best test whether that took part.

    Its advantage is at most (e^eps - 1 + 2 delta) / (e^eps + 1) (Humphries et al., 2023), and falls with epsilon.
    """
    trials, advantages = 300, []
    for noise in (0.4, 1.5, 6.0):
        mechanism, server = make(noise_multiplier=noise)
        sent = server.broadcast(0, 0)
        target = an_update("FedAvg", server, seed=5)
        change = torch.cat([(target.weights[n] - w).flatten() for n, w in sent.weights.items()])
        change /= change.norm()
        scores = {True: [], False: []}
        for trial in range(2 * trials):
            member = trial % 2 == 0
            if member:
                mechanism.add(target, sent)
            mean = mechanism.release(server, sent)
            noisy = torch.cat([(mean.weights[n] - w).flatten() for n, w in sent.weights.items()])
            scores[member].append(float(CLIENTS * noisy @ change))
        found = np.mean([s > 0.5 for s in scores[True]]) - np.mean([s > 0.5 for s in scores[False]])
        advantages.append(found)
        eps, delta = make(noise_multiplier=noise)[0].epsilon((1.0, 1)), mechanism.delta
        assert found <= (math.exp(eps) - 1 + 2 * delta) / (math.exp(eps) + 1) + 2 / math.sqrt(trials)
    assert advantages[0] > 0.6 > advantages[1] > 0.15
    assert advantages[1] > advantages[2] + 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 0}, "noise_multiplier must be a finite number above 0, got 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"delta": 1.5}, "delta must be between 0 and 1"),
        ({"quantile": 2.0}, "quantile must be between 0 and 1"),
        ({"accountant": "moments"}, "accountant must be"),
        ({"stop": True}, "set max_epsilon, too"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ClientPrivacy(**{"noise_multiplier": 1.0, **options})


def test_no_weights_have_no_adaptive_bound():
    with pytest.raises(ConfigurationError, match="quantile adapts the bound on weights, and clients send none"):
        make("FedProto", quantile=0.5)


def test_a_large_delta_is_told():
    with pytest.warns(UserWarning, match="delta is 0.1, too large to protect anyone: set it below 0.05"):
        make(delta=0.1)
