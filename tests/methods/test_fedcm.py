"""FedCM against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put
from _helpers.toy import Toy, assert_same, run, tiny_encoder, whole_state

from pfl_lightning import VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedCM

LR, EPOCHS, ALPHA, DECAY = 0.05, 2, 0.3, 5e-4
COHORTS = [[0, 2, 3], [1, 2], [0, 4]]
METHOD = partial(FedCM, lr=LR, epochs=EPOCHS, alpha=ALPHA)


def local_steps(net, steps, delta, momentum):
    """SGD along alpha g + (1 - alpha) Delta, written out; returns the mean direction, each as often as it acts."""
    steps, velocity = list(steps), {name: 0 * p.detach() for name, p in net.named_parameters()}
    total, acts = dict(velocity), 0.0
    for j, (inputs, labels) in enumerate(steps):
        share = sum(momentum**later for later in range(len(steps) - j))
        gradients = torch.autograd.grad(cross_entropy(net, inputs, labels), list(net.parameters()))
        acts += share
        with torch.no_grad():
            for (name, p), g in zip(net.named_parameters(), gradients, strict=True):
                direction = ALPHA * g + (1 - ALPHA) * delta[name] + DECAY * p
                total[name] = total[name] + share * direction
                velocity[name] = momentum * velocity[name] + direction
                p.sub_(LR * velocity[name])
    return {name: value / acts for name, value in total.items()}


def restate(data, momentum):
    """The global model after the rounds."""
    net = first_net()
    delta = {name: 0 * value for name, value in named(net).items()}
    for round, cohort in enumerate(COHORTS):
        trained, directions = [], []
        for client in cohort:
            local = copy_of(net)
            directions.append(local_steps(local, batches(data, client, round, "fit/0", EPOCHS), delta, momentum))
            trained.append(named(local))
        delta = mean_of(directions, [1] * len(cohort))
        put(net, mean_of(trained, [1] * len(cohort)))
    return named(net)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_equal_the_restatement(momentum):
    data = Toy()
    federation = run(partial(METHOD, momentum=momentum), len(COHORTS), cohorts=COHORTS, data=data)
    assert_same(named(federation.client_model(1)), restate(data, momentum), atol=2e-6)


def test_engines_agree():
    one, many = (run(METHOD, 2, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_without_momentum_of_the_server_it_is_fedavg():
    whole, data = partial(run, rounds=2, cohorts=[[3], [3]]), Toy  # of one client the plain mean is FedAvg's
    cm = whole(partial(METHOD, alpha=1.0), data=data())
    assert_same(
        named(cm.client_model(3)), named(whole(partial(FedAvg, lr=LR, epochs=EPOCHS), data=data()).client_model(3))
    )


def test_fine_tuning_is_without_the_momentum():
    tuned = run(partial(METHOD, fine_tune="all", fine_tune_epochs=1), 2, cohorts=COHORTS)
    assert_same(tuned.server.weights.as_state(), run(METHOD, 2, cohorts=COHORTS).server.weights.as_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"alpha": 0.0}, "alpha must be a finite number above 0"), ({"alpha": 1.5}, "must be at most 1, got 1.5")],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FedCM(tiny_encoder((6,)), 5, **options)


def test_steps_of_another_optimizer_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"expected SGD with .*: FedCM takes the mean of the gradients from its steps"
    ):
        run(partial(METHOD, optimizer=torch.optim.Adam), 1)
