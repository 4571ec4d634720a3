"""The number of torch's threads follows from model and batch, and the caller's comes back."""

from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import run

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.encoders import build_encoder
from pfl_lightning.engines import threads as rule
from pfl_lightning.engines.threads import threads_for_work, work_of
from pfl_lightning.methods import FedAvg

FIT = partial(FedAvg, lr=0.05, epochs=1, fine_tune="head")
ENGINES = pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine, VectorizedEngine])


@pytest.fixture
def three(monkeypatch):
    """A process whose torch has started with three threads, none of them asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rule, "_AT_IMPORT", 3)
    yield
    torch.set_num_threads(before)


class Watch(FedAvg):
    seen: ClassVar[list[int]] = []

    def make_update(self, context, before):
        self.seen.append(torch.get_num_threads())
        return super().make_update(context, before)

    def evaluate(self, *args, **kwargs):
        self.seen.append(torch.get_num_threads())
        return super().evaluate(*args, **kwargs)


@pytest.fixture
def seen(monkeypatch):
    """Numbers of threads in local fits and evaluations."""
    found = []
    monkeypatch.setattr(Watch, "seen", found)
    return found


def go(engine, **options):
    return run(partial(Watch, lr=0.05, epochs=1), 1, engine=engine, **options)


@ENGINES
def test_small_models_run_on_one_thread_and_the_callers_number_comes_back(engine, three, seen):
    federation = go(engine())
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
    federation.trainer.test(federation, federation.trainer.datamodule, verbose=False)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


def test_it_comes_back_after_an_error(three, monkeypatch):
    def fails(*args):
        assert torch.get_num_threads() == 1
        raise ArithmeticError("in a fit")

    monkeypatch.setattr(Watch, "make_update", fails)
    with pytest.raises(ArithmeticError):
        go(SequentialEngine())
    assert torch.get_num_threads() == 3


def test_what_a_callback_sets_stays(three):
    engine = SequentialEngine()
    engine._hold_threads(1)
    torch.set_num_threads(2)
    engine.stop()
    assert torch.get_num_threads() == 2


@ENGINES
def test_a_given_number_comes_first(engine, three, seen):
    go(engine(threads=2))
    assert set(seen) == {2}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_environments_number_stays(variable, three, seen, monkeypatch):
    monkeypatch.setenv(variable, "3")
    go(SequentialEngine())
    assert set(seen) == {3}


def test_a_number_that_the_script_has_set_stays(three, seen):
    torch.set_num_threads(2)
    go(SequentialEngine())
    assert set(seen) == {2}
    assert torch.get_num_threads() == 2


def test_a_model_that_is_fine_tuned_outside_of_a_run(three, monkeypatch):
    federation, seen = run(FIT, 1), []
    monkeypatch.setattr(
        SequentialEngine,
        "run_phase",
        lambda *args: seen.append(torch.get_num_threads()) or SimpleNamespace(num_steps=0, losses={}),
    )
    federation.client_model(0)
    assert seen == [1]
    assert torch.get_num_threads() == 3


def test_workers_have_the_number_of_the_rule(three, monkeypatch):
    made = []
    engine, ray = fake_ray_engine(monkeypatch, 2)
    remote = ray.remote
    monkeypatch.setattr(
        ray, "remote", lambda cls: remote(lambda *args, **more: made.append(args[0]) or cls(*args, **more))
    )
    go(engine)
    assert made == [1, 1]
    assert torch.get_num_threads() == 3


def test_it_is_said_once(three, caplog):
    engine = SequentialEngine()
    with caplog.at_level("INFO"):
        federation = go(engine)
        federation.trainer.test(federation, federation.trainer.datamodule, verbose=False)
    assert sum("Threads of local fits: 1, since a training step takes" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("name", "shape", "batch", "expected"),
    [
        ("mlp", (1, 8, 8), 200, 1),
        ("small_cnn", (1, 8, 8), 200, 1),
        ("fedpac_cnn", (3, 32, 32), 50, 1),
        ("resnet18_small", (3, 32, 32), 10, 2),
        ("resnet18_small", (3, 32, 32), 50, 4),
    ],
)
def test_the_rule_on_encoders(name, shape, batch, expected):
    encoder = build_encoder(name, shape).train()
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    work = work_of(encoder, torch.zeros(2, *shape))
    assert threads_for_work(batch * work) == expected
    assert work == work_of(encoder.double(), torch.zeros(3, *shape))
    assert encoder.training
    assert all(torch.equal(value, before[key]) for key, value in encoder.float().state_dict().items())


def test_layers_that_torch_does_not_count_are_counted_by_their_parameters():
    network = torch.nn.GRU(16, 32)
    weights = sum(p.numel() for p in network.parameters())
    assert work_of(network, torch.zeros(1, 5, 16)) >= 2 * weights
    table = torch.nn.Sequential(torch.nn.Embedding(10_000, 8), torch.nn.Linear(8, 2))
    assert work_of(table, torch.zeros(1, 3, dtype=torch.int64)) < 1000


def test_a_number_that_is_none():
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        SequentialEngine(threads=0)


def test_a_second_start_does_not_take_the_engines_own_number_for_the_callers(three):
    engine, chosen = SequentialEngine(), []

    def choose(models, data, environment):
        chosen.append(torch.get_num_threads())
        return 2

    engine.choose_threads = choose
    for _ in range(2):
        engine.start([], None, None)
    assert chosen == [3, 3]
    engine.stop()
    assert torch.get_num_threads() == 3


def test_the_work_of_an_encoder_is_counted_once(three, monkeypatch):
    counted = []
    monkeypatch.setattr(rule, "work_of", lambda encoder, samples: counted.append(encoder) or 1.0)
    federation = run(FIT, 1)
    assert len(counted) == 1
    for client in range(3):
        federation.client_model(client)
    assert len(counted) == 1
