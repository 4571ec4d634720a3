"""Optimizers of the server against plain torch, and which methods take one."""

from functools import partial
from pathlib import Path

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.project import Net
from _helpers.resume import play
from _helpers.toy import (
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    for_toy,
    normed_encoder,
    quiet_trainer,
    run,
    tiny_encoder,
    whole_state,
)

from pfl_lightning import Federation, VectorizedEngine, federate, methods
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import FedAvg, FedNova
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi

LR, EPOCHS = 0.05, 1
COHORTS = [[0, 2, 3], [1, 2], [0, 4]]
METHOD = partial(FedAvg, lr=LR, epochs=EPOCHS)
SGD = partial(torch.optim.SGD, lr=0.7, momentum=0.6)
OPTIMIZERS = {
    "FedAvgM": partial(FedAvgM, lr=0.8, momentum=0.6),
    "FedAdam": partial(FedAdam, lr=0.03, beta1=0.8, beta2=0.9, tau=0.02),
    "FedYogi": partial(FedYogi, lr=0.03, beta1=0.8, beta2=0.9, tau=0.02),
    "FedAdagrad": partial(FedAdagrad, lr=0.03, beta1=0.3, tau=0.02),
    "torch": SGD,
}


def stepped(name, x, delta, state):
    """Algorithm 2 element by element, in double precision; Delta is the average minus x."""
    lr, b1, b2, tau = 0.03, {"FedAdagrad": 0.3}.get(name, 0.8), 0.9, 0.02
    out = x.clone()
    for place in range(x.numel()):
        d = float(delta.reshape(-1)[place])
        m, v = state.get(place, (0.0, tau**2))
        if name in ("FedAvgM", "torch"):
            lr, momentum = (0.8, 0.6) if name == "FedAvgM" else (0.7, 0.6)
            m = momentum * m + d
            step = lr * m
        else:
            m = b1 * m + (1 - b1) * d
            if name == "FedAdam":
                v = b2 * v + (1 - b2) * d * d
            elif name == "FedYogi":
                v = v - (1 - b2) * d * d * ((v > d * d) - (v < d * d))
            else:
                v = v + d * d
            step = lr * m / (v**0.5 + tau)
        state[place] = m, v
        out.view(-1)[place] += step
    return out


def restate(data, name):
    """The global model after the rounds."""
    net, states = first_net(), {}
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            local = copy_of(net)
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR)
            trained.append(named(local))
        mean, before = mean_of(trained, [len(data.labels[client]) for client in cohort]), named(net)
        put(net, {n: stepped(name, x, mean[n] - x, states.setdefault(n, {})) for n, x in before.items()})
    return named(net)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rounds_equal_the_restatement(name):
    data = Toy()
    federation = run(METHOD, 3, cohorts=COHORTS, data=data, store={"server_optimizer": OPTIMIZERS[name]})
    assert_same(named(federation.client_model(1)), restate(data, name), atol=2e-6)


def test_a_rate_of_one_is_the_average():
    plain = run(METHOD, 3, cohorts=COHORTS)
    one = run(METHOD, 3, cohorts=COHORTS, store={"server_optimizer": partial(torch.optim.SGD, lr=1.0)})
    assert_same(named(one.client_model(1)), named(plain.client_model(1)), atol=1e-6)


def test_engines_agree():
    store = {"server_optimizer": OPTIMIZERS["FedAdam"]}
    one, many = (run(METHOD, 2, cohorts=COHORTS, engine=e, store=store) for e in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_statistics_and_counters_are_averaged():
    """After one round they are those of FedAvg, while weights are elsewhere."""
    options = {"encoder": normed_encoder, "data": Toy(batch_size=9)}
    plain = run(METHOD, 1, **options).server.weights.as_state()
    adam = run(METHOD, 1, **options, store={"server_optimizer": FedAdam}).server.weights.as_state()
    statistics = {n for n in plain if "running_" in n or "num_batches" in n}
    assert len(statistics) == 3
    for name in plain:
        assert torch.equal(plain[name], adam[name]) == (name in statistics), name


def test_frozen_parameters_take_their_mean():
    def frozen_bias(shape):
        encoder = tiny_encoder(shape)
        encoder[0].bias.requires_grad_(False)
        return encoder

    decays = partial(torch.optim.SGD, lr=1.0, weight_decay=0.5)
    server = run(METHOD, 1, encoder=frozen_bias, store={"server_optimizer": decays}).server
    assert "encoder.0.bias" not in server.stepped_names
    assert "encoder.0.weight" in server.stepped_names


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, name):
    def go(folder, rounds, **options):
        return play(folder, rounds, METHOD, store={"server_optimizer": OPTIMIZERS[name]}, **options)

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 2)
    resumed = go(tmp_path / "parts", 4, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    left, right = (one.server.server_optimizer.optimizer.state_dict()["state"] for one in (resumed, whole))
    for place, state in right.items():
        assert_same(left[place], state)


@pytest.mark.parametrize("other", [None, FedYogi])
def test_going_on_with_another_optimizer_is_refused(tmp_path, other):
    play(tmp_path, 1, METHOD, store={"server_optimizer": FedAdam})
    with pytest.raises(CheckpointError, match="of another server optimizer, FedAdam; this run has"):
        play(tmp_path, 2, METHOD, store={"server_optimizer": other}, ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_round_that_is_undone_leaves_the_optimizer_as_it_was():
    class Spoils(FedAdam):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            Spoils.steps += 1
            if Spoils.steps == 2:
                self.param_groups[0]["params"][0].data.fill_(float("nan"))

    with pytest.warns(UserWarning, match="round 2 is undone"):
        undone = run(METHOD, 2, store={"server_optimizer": Spoils})
    one = run(METHOD, 1, store={"server_optimizer": FedAdam})
    assert_same(dict(undone.server.named_parameters()), dict(one.server.named_parameters()))
    states = [f.server.server_optimizer.optimizer.state_dict()["state"] for f in (undone, one)]
    for place, state in states[1].items():
        assert_same(states[0][place], state)


def test_bfloat16_weights_have_an_optimizer_in_single_precision():
    server = run(METHOD, 2, precision="bf16-true", store={"server_optimizer": FedAdam}).server
    assert {w.dtype for w in server.weights.as_state().values()} == {torch.bfloat16}
    assert {p.dtype for p in server.server_optimizer.parameters()} == {torch.float32}


# ---------------------------------------------------------------------- which methods take one

OWN = {"FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"}
PAGE = (Path(__file__).parents[1] / "docs" / "methods" / "fedopt.md").read_text()
TAKE_ONE = PAGE.partition("Methods that take one:")[2].partition("\n\n")[0]


@pytest.mark.parametrize("method", methods.METHODS, ids=lambda method: method.__name__)
def test_which_methods_take_one(method):
    options = {} if method is methods.FedETF else {"epochs": 1}
    federation = Federation(for_toy(method, **options), tiny_encoder, server_optimizer=FedAdam)
    trainer = quiet_trainer(2, FederatedLoop(), limit_train_batches=1, limit_val_batches=0)
    if f"`{method.__name__}`" not in TAKE_ONE:  # a method that takes one is to be named on the page
        reason = "has one of its own" if method.__name__ in OWN else "averages no weights, or"
        message = f"{method.__name__} does not support server_optimizer: its server {reason}"
        with pytest.raises(ConfigurationError, match=message):
            trainer.fit(federation, datamodule=Toy())
    else:
        trainer.fit(federation, datamodule=Toy())
        assert federation.server.server_optimizer.optimizer.state_dict()["state"]


class _OwnFormula(AveragingAggregator):
    def aggregate(self):
        super().aggregate()


class _Own(FedAvg):
    def configure_aggregator(self, num_clients):
        return _OwnFormula(self, num_clients)


def test_an_aggregate_of_its_own_must_say_that_it_averages():
    with pytest.raises(ConfigurationError, match="steps by a formula of its own"):
        run(_Own, store={"server_optimizer": FedAdam})


def test_fednova_steps_along_its_own_direction():
    plain = run(partial(FedNova, lr=LR, epochs=1), 1)
    halved = run(partial(FedNova, lr=LR, epochs=1), 1, store={"server_optimizer": partial(torch.optim.SGD, lr=0.5)})
    start = named(first_net())
    for name, w in named(plain.client_model(0)).items():
        expected = (start[name] + w) / 2
        torch.testing.assert_close(named(halved.client_model(0))[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrong", [methods.FedAdam, "FedAdam", 3])
def test_what_makes_no_optimizer_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="server_optimizer must make an optimizer from parameters"):
        run(METHOD, store={"server_optimizer": wrong})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(FedAdam, lr=-1.0), r"server lr must be"),
        (partial(FedAdam, beta2=1.5), r"beta2 must be between 0 and 1"),
        (partial(FedYogi, tau=0.0), r"tau must be"),
        (partial(FedAvgM, momentum=-0.5), r"server momentum must be"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make([torch.nn.Parameter(torch.zeros(1))])


# ---------------------------------------------------------------------- projects


@pytest.mark.parametrize("form", ["federate", "callback"])
def test_a_users_module(form):
    """The federation of a module steps as that of an encoder does."""
    toy, name = Toy(), "FedAdam"
    given = {"server_optimizer": OPTIMIZERS[name], "seed": SEED}
    if form == "federate":
        module, data = federate(Net(), toy, FedAvg, **given)
        quiet_trainer(3, GivenCohorts(*COHORTS)).fit(module, datamodule=data)
        net = module.given_module
    else:
        loop = GivenCohorts(*COHORTS, method=FedAvg, **given)
        net = Net()
        quiet_trainer(3, loop).fit(net, datamodule=toy)
    found = {n.replace("body.", "encoder.").replace("fc.", "head."): p for n, p in named(net).items()}
    assert_same(found, restate(toy, name), atol=2e-6)


def test_a_loop_without_a_method_has_none():
    with pytest.raises(ConfigurationError, match="FederatedLoop got server_optimizer and no method: add one"):
        FederatedLoop(server_optimizer=FedAdam)
