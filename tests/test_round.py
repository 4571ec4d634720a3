"""A round with faulty clients: who is left out, what stays as it was, and which rounds are undone."""

import warnings
from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import CLIENTS, SEED, Toy, assert_same, for_toy, quiet_trainer, run, tiny_encoder, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import FederatedLoop, Federation, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import FederationError, InvalidMessageError
from pfl_lightning.methods import DCPFL, SCAFFOLD, Calibre, FedAvg, FedGH, FedPAC, FedPer, FedProto
from pfl_lightning.server import AveragingAggregator

BAD = 2
GOOD = [client for client in range(CLIENTS) if client != BAD]


def lying(method, change):
    """The method, whose client 2 changes its update."""

    class Lying(method):
        def make_update(self, context, before):
            update = super().make_update(context, before)
            return change(update) if context.client == BAD else update

    return Lying


def play(method, rounds=1, **options):
    """The final state, and what was said of clients that were left out and of rounds that were undone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run(method, rounds, limit_val_batches=0, **options)
    said = [str(w.message) for w in caught if "left out" in str(w.message) or "undone" in str(w.message)]
    return federation, said


def weights(change):
    return lambda update: replace(update, weights={name: change(t) for name, t in update.weights.items()})


LIES = {
    "another client": (lambda u: replace(u, client=0), "the update says it is from client 0, round 1"),
    "another round": (lambda u: replace(u, round=7), "the update says it is from client 2, round 8"),
    "no client": (lambda u: replace(u, client=None), "the update says it is from client None, round 1"),
    "a tensor as client": (lambda u: replace(u, client=torch.tensor([2, 2])), "the update says it is from client"),
    "nothing": (lambda u: None, "make_update returned NoneType, expected ClientUpdate"),
    "a text": (lambda u: "weights", "make_update returned str, expected ClientUpdate"),
    "1e30": (weights(lambda t: torch.full_like(t, 1e30)), "holds values of up to 1.0e+30"),
    "a factor of 1e18": (weights(lambda t: t * 1e18), "holds values of up to "),
    "sparse": (weights(lambda t: t.to_sparse()), "expected a dense one"),
    "int64": (weights(lambda t: t.long()), "has dtype torch.int64, expected torch.float32"),
    "bool": (weights(lambda t: t > 0), "has dtype torch.bool, expected torch.float32"),
    "NaN samples": (lambda u: replace(u, num_samples=float("nan")), "num_samples is nan"),
    "10^400 samples": (lambda u: replace(u, num_samples=10**400), "num_samples is a number of many digits"),
    "10^12 samples": (
        lambda u: replace(u, num_samples=10**12),
        "is 1000000000000, expected 14, the number",
    ),
    "a sample more": (lambda u: replace(u, num_samples=u.num_samples + 1), "num_samples is 15, expected 14"),
    "a sample less": (lambda u: replace(u, num_samples=u.num_samples - 1), "num_samples is 13, expected 14"),
    "weights by number": (lambda u: replace(u, weights={1: torch.ones(1)}), "unexpected ['1']"),
    "weights that are no tensors": (weights(lambda t: t.tolist()), "is a list, expected a tensor"),
    "no weights": (lambda u: replace(u, weights=None), "client 2, round 1: "),
}


@pytest.mark.parametrize(("change", "reason"), LIES.values(), ids=LIES)
def test_a_client_that_lies_is_left_out_and_named(change, reason):
    got, said = play(partial(lying(FedAvg, change), lr=0.05))
    expected, _ = play(partial(FedAvg, lr=0.05), cohorts=[GOOD])
    assert_same(whole_state(got), whole_state(expected))
    [line] = said
    assert line.startswith("left out of the aggregation: client 2, round 1: ")
    assert reason in line


@pytest.mark.repeated
@pytest.mark.parametrize("engine", [VectorizedEngine, TrainerEngine, None], ids=["vmap", "trainer", "ray"])
@pytest.mark.parametrize(
    "lie", ["another client", "nothing", "a text", "1e30", "10^12 samples", "sparse", "int64", "no weights"]
)
def test_a_client_that_lies_is_left_out_by_every_engine(lie, engine, monkeypatch):
    change, reason = LIES[lie]
    made = [fake_ray_engine(monkeypatch)[0] if engine is None else engine() for _ in range(2)]
    got, said = play(partial(lying(FedAvg, change), lr=0.05, epochs=1), engine=made[0])
    expected, _ = play(partial(FedAvg, lr=0.05, epochs=1), cohorts=[GOOD], engine=made[1])
    assert_same(whole_state(got), whole_state(expected), atol=1e-6)
    assert ["client 2, round 1" in line and reason in line for line in said] == [True], said


STATISTICS = {
    "negative counts": (FedPAC, lambda u: replace(u, counts=-u.counts), "expected at least 0"),
    "counts beyond the samples": (FedPAC, lambda u: replace(u, counts=u.counts + 10**9), "add up to num_samples"),
    "centroids of 1e30": (
        FedPAC,
        lambda u: replace(u, centroids=u.centroids + 1e30),
        "centroids holds values of up to",
    ),
    "centroids of int64": (FedPAC, lambda u: replace(u, centroids=u.centroids.long()), "has dtype torch.int64"),
    "factors of 1e18": (DCPFL, lambda u: replace(u, factors=u.factors + 1e18), "factors holds values of up to"),
    "negative counts of classes": (FedProto, lambda u: replace(u, counts=-u.counts), "expected at least 1"),
    "means of 1e30": (FedGH, lambda u: replace(u, means=u.means + 1e30), "means holds values of up to"),
    "a negative rate": (Calibre, lambda u: replace(u, divergence=u.divergence - 9), "expected at least 0"),
}


@pytest.mark.parametrize(("method", "change", "reason"), STATISTICS.values(), ids=STATISTICS)
def test_statistics_that_lie_are_left_out(method, change, reason):
    got, said = play(for_toy(lying(method, change), epochs=1), 2, cohorts=[range(CLIENTS), GOOD])
    expected, _ = play(for_toy(method, epochs=1), 2, cohorts=[GOOD])
    assert_same(whole_state(got), whole_state(expected))
    assert ["client 2, round 1" in line and reason in line for line in said] == [True], said


def test_absurd_numbers_that_stay_with_the_client_are_refused_alike():
    class Lying(FedPer):
        def make_update(self, context, before):
            if context.client == BAD:
                with torch.no_grad():
                    self.head.bias[0] = -1e30
            return super().make_update(context, before)

    got, said = play(partial(Lying, epochs=1))
    expected, _ = play(partial(FedPer, epochs=1), cohorts=[GOOD])
    assert_same(whole_state(got), whole_state(expected))
    assert "client 2, round 1: head.bias, which it keeps, holds values of up to 1.0e+30, expected at most" in said[0]


# ---------------------------------------------------------------------- errors in receive


def stumbling(aggregator):
    """The server, which has taken half of client 2's update when something goes wrong."""

    class Stumbling(aggregator):
        def receive(self, update):
            super().receive(update)
            if update.client == BAD:
                raise ZeroDivisionError("halfway")

    return Stumbling


@pytest.mark.parametrize("method", [FedAvg, FedPAC, DCPFL, FedGH, FedProto, Calibre], ids=lambda m: m.__name__)
def test_an_error_in_receive_leaves_the_server_as_it_was(method):
    class Unlucky(method):
        def configure_aggregator(self, num_clients):
            server = super().configure_aggregator(num_clients)
            server.__class__ = stumbling(type(server))
            return server

    got, said = play(for_toy(Unlucky, epochs=1), 2, cohorts=[range(CLIENTS), GOOD])
    expected, _ = play(for_toy(method, epochs=1), 2, cohorts=[GOOD])
    assert_same(whole_state(got), whole_state(expected))
    assert said == [
        "left out of the aggregation: client 2, round 1: the server cannot use its update (ZeroDivisionError: halfway)"
    ]


def test_a_server_that_can_take_nothing_ends_the_run_with_its_error():
    class Broken(AveragingAggregator):
        def receive(self, update):
            raise KeyError("a bug")

    class Method(FedAvg):
        def configure_aggregator(self, num_clients):
            return Broken(self, num_clients)

    with pytest.raises(FederationError, match=r"0 of 5 updates can be aggregated.*KeyError: 'a bug'") as caught:
        play(Method)
    assert isinstance(caught.value.__cause__, InvalidMessageError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


# ---------------------------------------------------------------------- rounds that are undone


def spoiling(method, rounds, value=float("nan"), error=None):
    """The method, whose server's first tensor holds something else after the aggregations of some rounds."""

    class Spoils(method):
        def configure_aggregator(self, num_clients):
            server = super().configure_aggregator(num_clients)

            class Spoiling(type(server)):
                def aggregate(self):
                    super().aggregate()
                    if self.last in rounds:
                        if error is not None:
                            raise error
                        next(self.buffers()).view(-1)[0] = value

                def receive(self, update):
                    self.last = update.round
                    super().receive(update)

                not_checkpointed = ("last",)

            server.last = -1
            server.__class__ = Spoiling
            return server

    return Spoils


@pytest.mark.parametrize("method", [FedAvg, FedPAC, FedProto], ids=lambda m: m.__name__)
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1e30])
def test_a_round_that_spoils_the_server_is_undone(method, value):
    """Everybody trains in rounds 0 and 2, and client 1 in round 1, of which nothing remains but its own state."""
    cohorts = [range(CLIENTS), [1], range(CLIENTS)]
    one, _ = play(for_toy(method, epochs=1), 1, cohorts=cohorts)
    two, said = play(for_toy(spoiling(method, {1}, value), epochs=1), 2, cohorts=cohorts)
    assert_same(*({n: t for n, t in whole_state(f).items() if n.startswith("server")} for f in (two, one)))
    assert len(said) == 1
    assert said[0].startswith("round 2 is undone: ")
    assert "after the aggregation. The server is again as it was before the round; lower the" in said[0]
    play(for_toy(spoiling(method, {1}, value), epochs=1), 3, cohorts=cohorts)  # and it goes on


def test_an_undone_round_leaves_scaffolds_variates_as_they_were():
    """c is the mean of all c_i, those of clients whose first fit was undone included."""
    cohorts = [[0, 2], range(CLIENTS), [0, 3]]
    undone, said = play(partial(spoiling(SCAFFOLD, {1}), epochs=1), 2, cohorts=cohorts)
    one, _ = play(partial(SCAFFOLD, epochs=1), 1, cohorts=cohorts)
    assert_same(whole_state(undone), whole_state(one))
    assert len(said) == 1
    three, _ = play(partial(spoiling(SCAFFOLD, {1}), epochs=1), 3, cohorts=cohorts)
    stored = [three.personal.get(client) for client in range(CLIENTS)]
    for name, control in three.server.control.as_state().items():
        own = torch.stack([state[f"own_control.{name.replace('.', '/')}"] for state in stored])
        torch.testing.assert_close(control, own.mean(0), atol=1e-6, rtol=0)


def test_rounds_that_fail_one_after_the_other_end_the_run():
    with pytest.raises(
        FederationError, match=r"round 5: 3 rounds in a row had to be undone; the last: .* is up to nan"
    ):
        play(partial(spoiling(FedAvg, {2, 3, 4}), epochs=1), 6)
    federation, said = play(partial(spoiling(FedAvg, {0, 1, 3, 4}), epochs=1), 6)
    assert [line.split(" is undone")[0] for line in said] == ["round 1", "round 2", "round 4", "round 5"]
    assert federation.trainer.current_epoch == 6


def test_an_aggregation_that_fails_is_undone_but_in_the_first_round():
    error = ArithmeticError("no solution")
    _, said = play(partial(spoiling(FedAvg, {1}, error=error), epochs=1), 3)
    assert "round 2 is undone: the aggregation fails (ArithmeticError: no solution)" in said[0]
    with pytest.raises(ArithmeticError, match="no solution"):
        play(partial(spoiling(FedAvg, {0}, error=error), epochs=1), 3)


def test_the_last_checkpoint_is_never_a_spoiled_one(tmp_path):
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    method = partial(spoiling(FedAvg, {1}), epochs=1)
    play(method, 2, callbacks=[keep], enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    tensors = [tensor for tensor in saved.values() if isinstance(tensor, torch.Tensor)]
    assert tensors
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class Stumble(L.Callback):
    """Fails after the second client of a round."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("stumbled")


@pytest.mark.parametrize("method", [FedAvg, FedPAC, SCAFFOLD])
def test_what_an_interrupted_round_has_received_does_not_count_in_a_next_fit(method):
    federation = Federation(partial(method, lr=0.05), tiny_encoder, seed=SEED)
    with pytest.raises(RuntimeError, match="stumbled"):
        quiet_trainer(1, FederatedLoop(), Stumble()).fit(federation, Toy())
    quiet_trainer(1, FederatedLoop()).fit(federation, Toy())
    assert_same(whole_state(federation), whole_state(run(partial(method, lr=0.05))))
