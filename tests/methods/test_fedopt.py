"""FedAvgM, FedAdam, FedYogi and FedAdagrad: the rounds of FedAvg with the server optimizer of the name."""

from functools import partial

import pytest
import torch
from _helpers.toy import assert_same, run, whole_state

from pfl_lightning import methods, server_optimizers
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

COHORTS = [[0, 2, 3], [1, 2], [0, 4]]
OTHERS = {"beta1": 0.7, "beta2": 0.8, "tau": 0.01}
CASES = [
    (FedAvgM, {"server_lr": 0.5, "server_momentum": 0.3}, {"lr": 0.5, "momentum": 0.3}),
    (FedAdam, {"server_lr": 0.02, **OTHERS}, {"lr": 0.02, **OTHERS}),
    (FedYogi, {"server_lr": 0.02, **OTHERS}, {"lr": 0.02, **OTHERS}),
    (FedAdagrad, {"server_lr": 0.02, "beta1": 0.2, "tau": 0.01}, {"lr": 0.02, "beta1": 0.2, "tau": 0.01}),
]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("method", "own", "options"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_rounds_are_those_of_fedavg_with_the_optimizer(method, own, options, given):
    own, options = (own, options) if given else ({}, {})
    got = run(partial(method, lr=0.05, epochs=1, **own), 3, cohorts=COHORTS)
    make = partial(getattr(server_optimizers, method.__name__), **options)
    expected = run(partial(FedAvg, lr=0.05, epochs=1), 3, cohorts=COHORTS, store={"server_optimizer": make})
    assert_same(whole_state(got), whole_state(expected))


def test_momentum_zero_is_fedavg():
    momentum = run(partial(FedAvgM, lr=0.05, epochs=1, server_momentum=0.0), 3, cohorts=COHORTS)
    plain = run(partial(FedAvg, lr=0.05, epochs=1), 3, cohorts=COHORTS)
    for name, weight in plain.server.weights.as_state().items():
        torch.testing.assert_close(momentum.server.weights.as_state()[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"])
def test_the_rate_of_the_server_is_checked(name):
    with pytest.raises(ConfigurationError, match="server lr must be"):
        run(partial(getattr(methods, name), server_lr=-1.0))
