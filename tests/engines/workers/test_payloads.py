"""Payloads sent to workers, their re-assignment when a worker dies, and replies: RayEngine without processes."""

import itertools
import logging
import warnings
from functools import lru_cache, partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.ray_helpers import FakeRay, Raises
from _helpers.toy import CLIENTS, GivenCohorts, Toy, assert_same, for_toy, run, whole_state

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import Traffic
from pfl_lightning.engines.workers.engine import PayloadBuilder
from pfl_lightning.engines.workers.packing import pack, unpack
from pfl_lightning.engines.workers.worker import ClientWork, Worker, read_switches, throw_switches
from pfl_lightning.errors import FederationError
from pfl_lightning.fit.tasks import FitTask
from pfl_lightning.messages import Broadcast
from pfl_lightning.methods import DCPFL, FedAvg, FedBABU, FedPAC, LocalOnly
from pfl_lightning.state.update_norms import UpdateGuard

FIT = partial(FedPAC, lr=0.05, epochs=1)


@pytest.fixture(scope="module")
def expected():
    return whole_state(run(FIT, 2, engine=SequentialEngine()))


# ---------------------------------------------------------------------- payloads


def work_of(model, client, weights, personal=None):
    return ClientWork(model, FitTask(None, Broadcast(client=client, round=0, weights=weights), personal or {}))


def test_what_the_server_sends_to_all_is_sent_once():
    alike, puts = {"a": torch.randn(40_000), "b": torch.randn(3)}, []
    payloads = PayloadBuilder(lambda packed: puts.append(packed) or len(puts) - 1, itertools.count())
    own = [torch.randn(10) for _ in range(6)]
    made = [payloads.make([work_of(0, c, alike, {"head": head})]) for c, head in enumerate(own)]
    assert len(puts) == 1
    assert [payload.work.num_bytes > 160_000 for payload in made] == [True] + [False] * 5
    assert payloads.num_bytes == sum(payload.work.num_bytes for payload in made) + puts[0].num_bytes
    for client, payload in enumerate(made):
        bundles = {number: unpack(puts[reference]) for number, reference in payload.bundles}
        assert bool(bundles) == (client > 0)
        (work,) = unpack(payload.work, bundles)
        assert work.task.broadcast.client == client
        assert torch.equal(work.task.broadcast.weights["a"], alike["a"])
        assert torch.equal(work.task.personal["head"], own[client])


def test_architectures_have_bundles_of_their_own_and_small_things_none():
    big, other, small, puts = torch.randn(20_000), torch.randn(30_000), torch.randn(9), []
    payloads = PayloadBuilder(lambda packed: puts.append(packed) or len(puts) - 1, itertools.count())
    for client in range(8):
        weights = {"w": big if client % 2 else other, "s": small}
        payload = payloads.make([work_of(client % 2, client, weights)])
    assert [len(unpack(packed)) for packed in puts] == [2, 1]  # `small` is in the first
    assert [number for number, _ in payload.bundles] == [0, 1]
    assert payload.alive == {0, 1}
    tiny = PayloadBuilder(lambda packed: pytest.fail("not worth it"), itertools.count())
    for client in range(3):
        tiny.make([work_of(0, client, {"s": small})])


def test_bytes_are_counted_and_shared_weights_travel_once_a_round(monkeypatch):
    def encoder(shape):
        net = torch.nn.Sequential(torch.nn.Linear(shape[0], 4000), torch.nn.Linear(4000, 4))
        net.out_features = 4
        return net

    engine, _ = fake_ray_engine(monkeypatch)
    federation = run(partial(FedAvg, epochs=1), 2, engine=engine, encoder=encoder, limit_val_batches=0)
    size = sum(tensor.nbytes for tensor in federation.server.weights.as_state().values())
    assert 2 * 2 * size < engine.bytes_sent < 2 * 2 * size + 2 * CLIENTS * 3000  # alone, then as a bundle, two rounds
    assert 2 * CLIENTS * size < engine.bytes_received < 2 * CLIENTS * (size + 5000)


class Chooses(SequentialEngine):
    """Each worker would take the way of its first client."""

    def run_phase(self, client, phase, context, environment, purpose):
        self.choices.setdefault("Net", f"as client {context.client}")
        return super().run_phase(client, phase, context, environment, purpose)


def test_the_first_choice_of_a_worker_is_that_of_the_run(monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch, 3, engine=Chooses())
    run(FIT, 2, engine=engine, cohorts=[[1, 2, 3], [0, 4]])
    assert engine.choices == {"Net": "as client 1"}
    again, _ = fake_ray_engine(monkeypatch, 3, engine=Chooses())
    again.choices = {"Net": "as before"}
    federation = run(FIT, 1, engine=again, cohorts=[[1, 2, 3]])
    assert federation.engine.choices == {"Net": "as before"}


# ---------------------------------------------------------------------- workers that die


@pytest.mark.repeated
@pytest.mark.parametrize("deaths", [[1], [2, 3], [5, 11], [1, 6, 9, 14]])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_dead_worker_costs_time_alone(deaths, workers, expected, monkeypatch, caplog):
    engine, ray = fake_ray_engine(monkeypatch, workers, deaths)
    assert_same(whole_state(run(FIT, 2, engine=engine)), expected)
    assert ray.actors == workers + len(deaths)
    assert not ray.deaths
    assert len(ray.used) >= min(workers, 2)
    assert sum("a worker died on client" in line for line in caplog.messages) == len(deaths)


def test_a_payload_on_which_every_worker_dies_ends_the_run(monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch, 1, [1, 2, 3])
    with pytest.raises(FederationError, match=r"client 0, round 1: 3 workers in turn have died on it.*fewer workers"):
        run(FIT, 1, engine=engine)
    assert engine._pool is None


def test_workers_that_do_not_start(monkeypatch):
    def dies(*args):
        raise FakeRay.exceptions.RayError("out of memory\nmore")

    monkeypatch.setattr(Worker, "prepare", dies)
    engine, _ = fake_ray_engine(monkeypatch, 2)
    with pytest.raises(FederationError, match="the start of workers: 3 workers in turn have died on it, the last: Ray"):
        run(FIT, 1, engine=engine)


def test_no_worker_in_time(monkeypatch):
    monkeypatch.setattr(FakeRay, "wait", lambda self, references, num_returns, timeout: ([], references))
    engine, _ = fake_ray_engine(monkeypatch, 2, start_timeout=7.0)
    with pytest.raises(
        FederationError, match=r"no worker has started within 7 s; 2 workers with .*num_cpus.*raise star"
    ):
        run(FIT, 1, engine=engine)


def test_a_round_that_ends_early_leaves_nothing_for_the_next(monkeypatch):
    options = {"limit_train_batches": 2, "limit_val_batches": 3, "num_sanity_val_steps": 1}
    reference = run(FIT, 2, **options)
    engine, ray = fake_ray_engine(monkeypatch, 3)
    federation = run(FIT, 2, engine=engine, **options)
    assert_same(whole_state(federation), whole_state(reference))
    assert list(federation.validation_scores) == [0, 1, 2]
    assert ray.calls == 2 * 2 + 1 + 2  # fits, the sanity check, evaluations: no worker is asked in vain


def test_what_was_in_hand_at_an_error_is_not_taken_for_the_next_rounds(monkeypatch):
    engine, ray = fake_ray_engine(monkeypatch, 2)
    federation = run(FIT, 1, engine=engine)
    engine.start(federation.clients.models, federation.trainer.datamodule, federation.environment)
    for _ in range(2):
        begun = federation.begin_round(Traffic(), UpdateGuard())
        assert begun.fit_next(0).error is None
        begun.fits.close()
    assert ray.actors > 4  # of the fit and of this start: those that had something in hand were replaced


# ---------------------------------------------------------------------- what comes back


def test_an_error_in_a_worker_is_raised_here(monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch, 2, engine=Raises())
    with pytest.raises(RuntimeError, match="Unlucky: wind and rain") as caught:
        run(FIT, 1, engine=engine)
    assert "in a worker process" in str(caught.value.__cause__)
    assert "ray_helpers.py" in str(caught.value.__cause__)
    assert "in the local fit of client 2, round 1" in caught.value.__notes__
    assert engine._pool is None


def test_a_client_that_diverges_is_left_out_as_under_fabric_fit(monkeypatch):
    def garbage(inputs, targets):
        inputs[20] = torch.inf

    def go(engine):
        with pytest.warns(UserWarning, match="left out of the aggregation: client 1, round 1: the encoder's features"):
            return run(FIT, 1, engine=engine, data=Toy(change=garbage), limit_val_batches=0)

    assert_same(whole_state(go(fake_ray_engine(monkeypatch, 2)[0])), whole_state(go(SequentialEngine())))


class Talks(FedAvg):
    def make_update(self, context, before):
        warnings.warn("this client is slow", UserWarning, stacklevel=1)
        logging.getLogger("pfl_lightning.talks").warning("a line of the log")
        return super().make_update(context, before)


def test_warnings_and_log_lines_of_workers_appear_here_once(monkeypatch, caplog):
    engine, _ = fake_ray_engine(monkeypatch, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(partial(Talks, epochs=1), 2, engine=engine)
    slow = [warning for warning in caught if "this client is slow" in str(warning.message)]
    assert len(slow) == 1
    assert slow[0].filename == __file__
    assert caplog.messages.count("a line of the log") == 1


def test_the_reason_against_vectorizing_is_said_once(monkeypatch, caplog):
    class Prints(FedAvg):
        def training_step(self, batch, batch_idx):
            found = super().training_step(batch, batch_idx)
            found["loss"].item()
            return found

    engine, _ = fake_ray_engine(monkeypatch, 2, engine=VectorizedEngine(2, forward="vmap"))
    run(partial(Prints, epochs=1), 2, engine=engine)
    assert sum("run one by one" in line for line in caplog.messages) == 1


# ---------------------------------------------------------------------- one round after the other


@lru_cache(maxsize=2)
def without_workers(method):
    """What orders of replies are compared with."""
    return run(for_toy(method, lr=0.05), 3)


@pytest.mark.repeated
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("method", [FedAvg, FedPAC, DCPFL, LocalOnly, FedBABU], ids=lambda method: method.__name__)
def test_whatever_the_order_of_the_replies_and_deaths(method, seed, monkeypatch):
    """Shared tensors are of this round: weights of the last one have other names."""
    fit = for_toy(method, lr=0.05)
    engine, ray = fake_ray_engine(monkeypatch, 3, deaths=[4, 11], seed=seed)
    got, want = run(fit, 3, engine=engine), without_workers(method)
    assert_same(whole_state(got), whole_state(want))
    assert got.test_scores == want.test_scores
    assert len(ray.used) > 2
    assert not ray.deaths


def test_workers_that_die_while_idle_are_nobodys_fault(monkeypatch, caplog):
    class Kills(GivenCohorts):
        def on_train_epoch_start(self, trainer, pl_module):
            super().on_train_epoch_start(trainer, pl_module)
            for slot in pl_module.engine._pool._slots:
                slot.worker.actor.dead = slot.started

    engine, _ = fake_ray_engine(monkeypatch, 3)
    got = run(FIT, 4, loop=Kills([0, 2], [1], [2], [0]), engine=engine)
    assert_same(whole_state(got), whole_state(run(FIT, 4, cohorts=[[0, 2], [1], [2], [0]])))
    assert sum("an idle worker died" in line for line in caplog.messages) >= 6
    assert not any("died on client" in line for line in caplog.messages)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_precisions(precision, monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch, 2)
    got, want = (run(FIT, 2, engine=one, precision=precision) for one in (engine, SequentialEngine()))
    assert_same(whole_state(got), whole_state(want))
    assert got.test_scores == want.test_scores


PRECISIONS = ("tf32", "ieee", "tf32", "bf16", "none", "none")


@pytest.mark.parametrize(
    "precision", [("medium", ("tf32", "tf32", "tf32", "bf16", "none", "none")), (None, PRECISIONS)]
)
def test_torchs_switches_reach_the_workers(precision):
    """Of the precision of products torch has one for all, and those of its backends, which it refuses to mix."""
    switches = ((True, True), precision[0], *precision[1], True, True, True, torch.float64, True)
    before = read_switches()
    try:
        throw_switches(unpack(pack(switches)))
        assert read_switches() == switches
    finally:
        throw_switches(before)
    assert read_switches() == before != switches


def test_a_precision_set_by_the_backends_switch_ends_no_run(monkeypatch):
    """Torch then refuses to answer get_float32_matmul_precision."""
    before = read_switches()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        engine, _ = fake_ray_engine(monkeypatch, 2)
        assert run(FIT, 1, engine=engine).has_trained
    finally:
        throw_switches(before)
