"""A client whose fit goes wrong is named, left out, and leaves nothing behind."""

import warnings
from functools import partial

import pytest
import torch
from _helpers.methods import EVERY_METHOD
from _helpers.plain import named
from _helpers.toy import CLIENTS, GivenCohorts, Toy, assert_same, for_toy, run, whole_state

from pfl_lightning import ClientUpdate, SequentialEngine, TrainerEngine
from pfl_lightning.datamodules import BatchLoader
from pfl_lightning.errors import (
    ClientError,
    ConfigurationError,
    FederationError,
    InvalidMessageError,
    NonFiniteLossError,
)
from pfl_lightning.methods import FedAvg, FedPAC, FedPer, FedRep, LocalOnly

ENGINES = [SequentialEngine, TrainerEngine]
BAD = 2


def poison(value):
    """One sample of client 2 becomes ``value``."""
    first = sum(len(own) for own in Toy().labels[:BAD])

    def change(inputs, targets):
        inputs[first + 3] = value

    return change


def play(method, rounds=1, **options):
    """A run with the bad client; returns the federation and the warnings about clients that were left out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run(method, rounds, data=Toy(change=poison(float("nan"))), **options)
    return federation, [str(w.message) for w in caught if "left out of the aggregation" in str(w.message)]


class _ByHand(GivenCohorts):
    """Keeps the errors of a round, before the loop forgets them."""

    def __init__(self, *cohorts, **options):
        super().__init__(*cohorts, **options)
        self.errors = []

    def on_train_batch_end(self, trainer, *rest):
        if trainer.is_last_batch:
            self.errors += [result.error for result in self.results if result.error is not None]
        super().on_train_batch_end(trainer, *rest)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [FedAvg, FedPer, LocalOnly, FedRep], ids=lambda method: method.__name__)
def test_a_non_finite_loss_names_client_round_and_step(engine, method):
    loop = _ByHand(range(CLIENTS), [0, 2])
    _, messages = play(partial(method, epochs=1), 2, loop=loop, engine=engine())
    assert [(error.client, error.round) for error in loop.errors] == [(BAD, 0), (BAD, 1)]
    assert all(isinstance(error, NonFiniteLossError) for error in loop.errors)
    assert len(messages) == 2
    for round, message in enumerate(messages):
        assert f"client {BAD}, round {round + 1}: the loss is nan at step " in message


@pytest.mark.parametrize("engine", ENGINES)
def test_the_step_is_the_first_bad_one(engine):
    generator_order = _order_of_first_epoch()
    loop = _ByHand(range(CLIENTS))
    play(partial(FedAvg, epochs=2), loop=loop, engine=engine())
    assert f"at step {generator_order.index(3) // 4} of phase 'fit'" in str(loop.errors[0])


def _order_of_first_epoch():
    from _helpers.toy import SEED

    from pfl_lightning.seeding import seeded_generator

    return torch.randperm(len(Toy().labels[BAD]), generator=seeded_generator(SEED, "fit/0", 0, BAD)).tolist()


@pytest.mark.repeated
@pytest.mark.parametrize("engine", ENGINES)
@EVERY_METHOD
def test_the_others_go_on_as_if_the_bad_client_were_not_there(engine, method):
    options = {"fine_tune": None} if method.__name__ == "FedBABU" else {}
    fit = for_toy(method, lr=0.05, epochs=1, **options)
    with_bad, messages = play(fit, 2, engine=engine(), cohorts=[[0, 2, 3], [1, 2, 4]])
    without, none = play(fit, 2, engine=engine(), cohorts=[[0, 3], [1, 4]])
    assert_same(whole_state(with_bad), whole_state(without))
    assert len(messages) == 2
    assert none == []


def test_the_bad_clients_own_state_is_as_before():
    """It trained well in the first round; its second fit fails and must not change what it had."""
    data = Toy()
    good_round = run(partial(FedPer, epochs=1), 1, data=data)
    kept = good_round.personal.get(BAD)["head.weight"].clone()

    class TurnsBad(FedPer):
        def before_fit(self, context):
            self.bad = context.client == BAD and context.round == 1

        def loss_terms(self, features, labels):
            terms = super().loss_terms(features, labels)
            return {name: term * float("inf") if self.bad else term for name, term in terms.items()}

    with pytest.warns(UserWarning, match="client 2, round 2"):
        federation = run(partial(TurnsBad, epochs=1), 2, data=data)
    assert torch.equal(federation.personal.get(BAD)["head.weight"], kept)
    assert not torch.equal(federation.personal.get(1)["head.weight"], good_round.personal.get(1)["head.weight"])


@pytest.mark.parametrize(("min_clients", "passes"), [(4, True), (5, False)])
def test_the_run_fails_only_below_the_minimum(min_clients, passes):
    loop = GivenCohorts(range(CLIENTS), min_clients=min_clients)
    if passes:
        assert play(FedAvg, loop=loop)[0].personal.num_clients == CLIENTS
    else:
        with pytest.raises(FederationError, match=r"round 1: 4 of 5 updates .* min_clients is 5.*client 2, round 1"):
            play(FedAvg, loop=loop)


def test_nobody_left_fails():
    with pytest.raises(FederationError, match="0 of 1 updates"):
        play(FedAvg, cohorts=[[BAD]])


def test_weights_that_became_infinite_are_refused_even_with_a_finite_loss():
    """The last step overflows; no later loss shows it."""

    class Overflows(LocalOnly):
        def on_train_end(self):
            if self.phase.name == "fit":
                self.head.bias.data[0] = float("inf")

    with pytest.raises(FederationError, match=r"client 0, round 1: head.bias is not finite"):
        run(Overflows)
    with pytest.raises(FederationError, match=r"ClientUpdate.weights.head.bias holds 1 non-finite values of 5"):
        run(type("Shared", (Overflows,), {"shared": ("*",), "eval_model": "aggregated"}))


class _Misshapen(FedAvg):
    """Client 2 uploads something else."""

    change = staticmethod(dict)

    def make_update(self, context, before):
        update = super().make_update(context, before)
        if context.client != BAD:
            return update
        weights = type(self).change(update.weights)
        return ClientUpdate(client=BAD, round=context.round, num_samples=update.num_samples, weights=weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {**w, "head.bias": torch.zeros(7)}, r"has shape \(7,\), expected \(5,\)"),
        (lambda w: {n: t for n, t in w.items() if n != "head.bias"}, r"missing \['head.bias'\]"),
        (lambda w: {**w, "x": torch.zeros(1)}, r"unexpected \['x'\]"),
        (lambda w: {**w, "head.bias": torch.full((5,), float("nan"))}, "holds 5 non-finite values of 5"),
    ],
    ids=["shape", "missing", "surplus", "nan"],
)
def test_a_misshapen_upload_is_left_out(change, message):
    method = partial(type("Bad", (_Misshapen,), {"change": staticmethod(change)}), lr=0.05)
    with pytest.warns(UserWarning, match=rf"left out of the aggregation: client 2, round 1: .*{message}"):
        federation = run(method, limit_val_batches=0)
    without = run(partial(FedAvg, lr=0.05), cohorts=[[0, 1, 3, 4]], limit_val_batches=0)
    assert_same(named(federation.client_model(0)), named(without.client_model(0)))


def test_misshapen_statistics_are_left_out():
    class Bad(FedPAC):
        def make_update(self, context, before):
            from dataclasses import replace

            update = super().make_update(context, before)
            return replace(update, centroids=torch.zeros(3, 3)) if context.client == BAD else update

    with pytest.warns(UserWarning, match=r"client 2, round 1: FedPACUpdate.centroids has shape \(3, 3\)"):
        run(Bad)


def test_other_errors_stop_the_run_and_say_where():
    class Broken(FedAvg):
        def loss_terms(self, features, labels):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug") as caught:
        run(Broken)
    assert caught.value.__notes__ == ["in the local fit of client 0, round 1"]


def test_client_errors_survive_the_way_between_processes():
    import pickle

    for kind in (ClientError, NonFiniteLossError, InvalidMessageError):
        error = pickle.loads(pickle.dumps(kind(3, 4, "why")))
        assert (type(error), error.client, error.round, str(error)) == (kind, 3, 4, "client 3, round 5: why")


def test_a_loader_that_never_ends_is_an_error(monkeypatch):
    once = BatchLoader.__iter__

    def again_and_again(self):
        for number in range(1000):
            assert number < 20, "read without an end"
            yield from once(self)

    monkeypatch.setattr(BatchLoader, "__iter__", again_and_again)
    with pytest.raises(
        ConfigurationError, match="client 0: its loader gives more batches in an epoch than it has samples"
    ):
        run(partial(FedAvg, epochs=1), 1, engine=SequentialEngine())
