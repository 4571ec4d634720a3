"""Who takes part in a round, and what travels."""

from functools import partial

import numpy as np
import pytest
from _helpers.toy import BATCH, CLASSES, CLIENTS, FEATURES, INPUTS, Toy, run

from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPAC, FedPer, LGFedAvg, LocalOnly

HEAD = FEATURES * CLASSES + CLASSES
ENCODER = INPUTS * 5 + 5 + 5 * FEATURES + FEATURES
COHORTS = [[0, 2, 3], [1, 2]]
MESSAGES = sum(len(cohort) for cohort in COHORTS)


@pytest.mark.parametrize(
    ("cohort", "size"), [(1.0, 20), (0.3, 6), (0.31, 7), (0.001, 1), (1, 1), (7, 7), (20, 20), (0.15, 3), (0.55, 11)]
)
def test_size_of_the_cohort(cohort, size):
    loop = FederatedLoop(cohort)
    for round in range(3):
        clients = loop.sample_cohort(round, 20, seed=0, max_rounds=9)
        assert len(clients) == size
        assert clients == sorted(set(clients))
        assert 0 <= clients[0] <= clients[-1] < 20


@pytest.mark.parametrize("cohort", [0, 0.0, -1, -0.5, 1.5, True])
def test_cohorts_without_meaning_are_refused(cohort):
    with pytest.raises(ConfigurationError, match="cohort must be"):
        FederatedLoop(cohort)


def test_a_minimum_without_meaning_is_refused():
    with pytest.raises(ConfigurationError, match="min_clients must be at least 1"):
        FederatedLoop(min_clients=0)


def test_a_cohort_larger_than_the_federation_is_refused():
    with pytest.raises(ConfigurationError, match="cohort is 6 clients, there are 5"):
        run(FedAvg, loop=FederatedLoop(6))


def test_everybody_in_the_last_round():
    loop = FederatedLoop(0.3, full_participation_in_last_round=True)
    sizes = [len(loop.sample_cohort(round, 10, 0, 4)) for round in range(6)]
    assert sizes == [3, 3, 3, 10, 3, 3]
    assert len(loop.sample_cohort(0, 10, 0, None)) == 3


def test_everybody_trains_in_the_last_round_of_a_fit():
    federation = run(partial(LocalOnly, epochs=1), 3, loop=FederatedLoop(1, full_participation_in_last_round=True))
    assert all(federation.personal.written(k) for k in range(CLIENTS))
    some = run(partial(LocalOnly, epochs=1), 3, loop=FederatedLoop(1))
    assert 0 < sum(some.personal.written(k) for k in range(CLIENTS)) <= 3


def test_the_cohort_is_a_pure_function():
    first, second = FederatedLoop(0.4), FederatedLoop(0.4)
    drawn = [first.sample_cohort(round, 50, 7, 100) for round in range(20)]
    np.random.default_rng().random()
    again = [second.sample_cohort(round, 50, 7, None) for round in reversed(range(20))]
    assert drawn == again[::-1]
    assert len({tuple(cohort) for cohort in drawn}) == 20
    assert drawn != [first.sample_cohort(round, 50, 8, 100) for round in range(20)]


def test_cohorts_are_uniform_over_clients_and_pairs():
    """Over many rounds every client, and every pair of clients, comes equally often (chi-square, 5 sigma)."""
    rounds, clients, size = 4000, 12, 4
    loop = FederatedLoop(size)
    present = np.zeros((rounds, clients))
    for round in range(rounds):
        present[round, loop.sample_cohort(round, clients, 3, None)] = 1
    share = size / clients
    spread = np.sqrt(rounds * share * (1 - share))
    assert np.abs(present.sum(0) - rounds * share).max() < 5 * spread
    pairs = present.T @ present
    share = size * (size - 1) / (clients * (clients - 1))
    spread = np.sqrt(rounds * share * (1 - share))
    together = pairs[np.triu_indices(clients, 1)]
    assert np.abs(together - rounds * share).max() < 5 * spread
    assert together.std() > 0.3 * spread  # drawn, not dealt


def test_the_fit_follows_the_drawn_cohorts():
    seen = []

    class Watched(FedAvg):
        def before_fit(self, context):
            seen.append((context.round, context.client))

    run(partial(Watched, epochs=1), 4, loop=FederatedLoop(0.5), seed=5)
    loop = FederatedLoop(0.5)
    assert seen == [(round, k) for round in range(4) for k in loop.sample_cohort(round, CLIENTS, 5, 4)]


# ---------------------------------------------------------------------- traffic

CENTROIDS = CLASSES * FEATURES * 4
PRESENT = CLASSES  # bool
# Uploads of FedPAC: centroids and counts (alignment), weighted means and the variance (combination).
ALIGN, COMBINE = CENTROIDS + CLASSES * 8, CENTROIDS + 4


@pytest.mark.parametrize(
    ("method", "weights", "up", "down"),
    [
        (FedAvg, ENCODER + HEAD, 0, 0),
        (FedPer, ENCODER, 0, 0),
        (LGFedAvg, HEAD, 0, 0),
        (LocalOnly, 0, 0, 0),
        (FedPAC, ENCODER + HEAD, ALIGN + COMBINE, CENTROIDS + PRESENT),
        (partial(FedPAC, alignment=0.0), ENCODER + HEAD, COMBINE, 0),
        (partial(FedPAC, combination=False), ENCODER, ALIGN, CENTROIDS + PRESENT),
    ],
    ids=["FedAvg", "FedPer", "LGFedAvg", "LocalOnly", "FedPAC", "FedPAC combination", "FedPAC alignment"],
)
def test_bytes_by_hand(method, weights, up, down):
    """Counted with a pencil: parameters of four bytes, times the clients of both cohorts."""
    loop = _given()
    run(partial(method, epochs=1), 2, loop=loop, data=Toy(batch_size=BATCH))
    for direction, statistics in ((loop.traffic.up, up), (loop.traffic.down, down)):
        expected = {"weights": MESSAGES * weights * 4, "statistics": MESSAGES * statistics}
        assert {k: v for k, v in direction.items() if v} == {k: v for k, v in expected.items() if v}


def test_a_failed_client_has_received_but_not_sent():
    class Fails(FedAvg):
        def loss_terms(self, features, labels):
            return {name: term * float("nan") for name, term in super().loss_terms(features, labels).items()}

    loop = _given(min_clients=1)
    with pytest.raises(RuntimeError, match="0 of 3 updates"), pytest.warns(UserWarning, match="left out"):
        run(Fails, loop=loop)
    assert loop.traffic.down == {"weights": 3 * (ENCODER + HEAD) * 4}
    assert loop.traffic.up == {}


def _given(**options):
    from _helpers.toy import GivenCohorts

    return GivenCohorts(*COHORTS, **options)


@pytest.mark.parametrize("cohort", [[0, CLIENTS], [-1]])
def test_a_cohort_of_clients_that_do_not_take_part_is_refused(cohort):
    with pytest.raises(ConfigurationError, match=r"round 1: sample_cohort returned .*, expected positions among the 5"):
        run(FedAvg, 1, cohorts=[cohort])
