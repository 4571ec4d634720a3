"""FedProx: where the proximal term acts; its rounds are compared with plain torch in test_averaging_methods."""

from functools import partial

from _helpers.toy import run

from pfl_lightning.methods import FedAvg, FedProx


def test_the_proximal_term_is_no_part_of_a_fine_tuning():
    options = {"lr": 0.01, "epochs": 1, "fine_tune": "all", "fine_tune_epochs": 9}
    got, want = (run(partial(method, **options), 1, cohorts=[[0]]) for method in (partial(FedProx, mu=0.0), FedAvg))
    assert got.test_scores == want.test_scores
    losses = [run(partial(FedProx, mu=mu, **options), 0).test_scores for mu in (0.0, 50.0)]
    assert losses[0] == losses[1]
