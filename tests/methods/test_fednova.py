"""FedNova against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, run, whole_state

from pfl_lightning import VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedNova

LR, EPOCHS, DECAY = 0.05, 2, 5e-4
COHORTS = [[0, 2, 3], [1, 2], [0, 4]]
METHOD = partial(FedNova, lr=LR, epochs=EPOCHS)


def norm_of(steps, momentum):
    """||a||_1, the weights of the gradients in the sum of the steps, counted as they act."""
    counter = total = 0.0
    for _ in range(steps):
        counter = momentum * counter + 1
        total += counter
    return total


def restate(data, momentum):
    """The global model after the rounds."""
    net = first_net()
    for round, cohort in enumerate(COHORTS):
        sent, directions, norms, counts = named(net), [], [], [len(data.labels[k]) for k in cohort]
        for client in cohort:
            local, steps = copy_of(net), list(batches(data, client, round, "fit/0", EPOCHS))
            sgd(local, steps, list(local.parameters()), LR, momentum=momentum)
            norms.append(norm_of(len(steps), momentum))
            directions.append({n: (sent[n] - w) / norms[-1] for n, w in named(local).items()})
        tau = sum(n * a for n, a in zip(counts, norms, strict=True)) / sum(counts)
        mean = mean_of(directions, counts)
        put(net, {name: sent[name] - tau * mean[name] for name in mean})
    return named(net)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_rounds_equal_the_restatement(momentum):
    data = Toy()
    federation = run(partial(METHOD, momentum=momentum), len(COHORTS), cohorts=COHORTS, data=data)
    assert_same(named(federation.client_model(1)), restate(data, momentum), atol=2e-6)


def test_of_equal_numbers_of_steps_it_is_fedavg():
    equal = [[0, 1, 2, 3] * 2] * CLIENTS
    ours, plain = (run(partial(m, lr=LR, epochs=EPOCHS), 2, data=Toy(equal)) for m in (FedNova, FedAvg))
    assert_same(ours.server.weights.as_state(), plain.server.weights.as_state(), atol=1e-6)
    unequal = run(METHOD, 2).server.weights.as_state(), run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2).server.weights
    assert any(not torch.allclose(w, unequal[1].as_state()[name], atol=1e-5) for name, w in unequal[0].items())


def test_statistics_are_averaged():
    data = Toy([[0] * 6 + [1] * 6, [1] * 4 + [2] * 4], batch_size=4)
    runs = (
        run(partial(m, lr=LR, epochs=1), 1, cohorts=[[0, 1]], data=data, encoder=normed_encoder)
        for m in (FedNova, FedAvg)
    )
    ours, plain = (federation.server.weights.as_state() for federation in runs)
    for name in ("encoder.1.running_mean", "encoder.1.num_batches_tracked"):
        torch.testing.assert_close(ours[name], plain[name])


def test_engines_agree():
    one, many = (run(METHOD, 2, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


@pytest.mark.parametrize("own", [{"optimizer": torch.optim.Adam}, {"momentum": 1.0}])
def test_steps_that_do_not_add_up_are_refused(own):
    with pytest.raises(
        ConfigurationError, match=r"FedNova takes the number of gradients from (the|its) steps.* use FedAvg"
    ):
        run(partial(METHOD, **own), 1)
