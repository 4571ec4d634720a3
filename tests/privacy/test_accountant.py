"""Epsilon against the closed form of one Gaussian release, opacus's own figures, and a published one."""

import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.privacy.accountant import epsilon, rounds_within


def analytic(sigma, delta):
    """Epsilon of the Gaussian mechanism of sensitivity 1 (Balle and Wang, 2018, Theorem 8)."""

    def excess(eps):
        first, second = norm.cdf(1 / (2 * sigma) - eps * sigma), norm.cdf(-1 / (2 * sigma) - eps * sigma)
        return first - math.exp(eps) * second - delta

    return brentq(excess, 0, 100)


@pytest.mark.parametrize("sigma", [0.7, 2.0, 6.0])
def test_one_round_of_all_clients_is_the_analytic_gaussian_mechanism(sigma):
    exact = analytic(sigma, 1e-4)
    assert exact <= epsilon(((sigma, 1.0, 1),), 1e-4) <= 1.25 * exact
    assert epsilon(((sigma, 1.0, 1),), 1e-4, "prv") == pytest.approx(exact, abs=0.02)


def test_rounds_without_sampling_are_one_with_less_noise():
    """k releases of noise sigma are one of sigma / sqrt(k)."""
    assert epsilon(((3.0, 1.0, 9),), 1e-3) == pytest.approx(epsilon(((1.0, 1.0, 1),), 1e-3))


def test_figures_are_those_of_opacus():
    accountants = pytest.importorskip("opacus.accountants")
    spent = ((1.1, 0.05, 40), (0.9, 0.2, 3))
    for kind in ("rdp", "prv"):
        made = accountants.create_accountant(kind)
        made.history = [*spent]
        assert epsilon(spent, 1e-4, kind) == pytest.approx(made.get_epsilon(1e-4), rel=1e-6)


def test_a_published_figure_is_an_upper_bound():
    """DP-FedAvg (McMahan et al., 2018): 763,430 users, 5,000 a round, z = 1, 5,000 rounds: (4.634, 1e-9)."""
    assert 3.5 < epsilon(((1.0, 5000 / 763430, 5000),), 1e-9) <= 4.634


def test_sampling_and_noise_lower_epsilon_and_rounds_raise_it():
    assert epsilon(((1.0, 0.1, 10),), 1e-3) < epsilon(((1.0, 0.2, 10),), 1e-3) < epsilon(((0.8, 0.2, 10),), 1e-3)
    assert epsilon((), 1e-3) == 0 < epsilon(((1.0, 0.1, 10),), 1e-3) < epsilon(((1.0, 0.1, 11),), 1e-3)


def test_as_many_rounds_as_fit():
    spent = ((1.0, 0.1, 5),)
    rounds = rounds_within(spent, 1.0, 0.1, 1e-3, 3.0, "rdp")
    assert epsilon(((1.0, 0.1, 5 + rounds),), 1e-3) <= 3.0 < epsilon(((1.0, 0.1, 6 + rounds),), 1e-3)
    assert rounds_within((), 0.3, 1.0, 1e-3, 0.1, "rdp") == 0


def test_without_opacus_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'pfl-lightning\[privacy\]'"):
        epsilon(((1.23, 0.5, 1),), 1e-3, "prv")
