"""Compiled steps give what plain ones give; what cannot be compiled goes on without, and says so once.

``test_inductor_agrees`` takes over 10 s: the compiler itself runs.
"""

import copy
import gc
import pickle
import random
import weakref
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.toy import FEATURES, Toy, assert_same, normed_encoder, run, whole_state
from torch import nn

from pfl_lightning import VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.engines.vectorized import graphs as steps
from pfl_lightning.methods import DualFed, FedAvg, FedBN, FedPAC, FedProx, FedRoD

LABELS = [[0, 1] * 4, [1, 2] * 4, [0, 2] * 6]  # in batches of 4: two whole batches, two, and three


@pytest.fixture
def early(monkeypatch):
    """Compile the second step of a shape, but run the graph as it was recorded; collects the graphs."""
    graphs = []
    monkeypatch.setattr(steps, "USES", 2)
    monkeypatch.setattr(steps, "MAX_GRAPHS", 3)
    monkeypatch.setattr(steps, "compile_graph", lambda graph: graphs.append(graph) or graph)
    return graphs


def dropout_and_norm(input_shape):
    encoder = nn.Sequential(nn.Linear(input_shape[0], FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.4))
    encoder.out_features = FEATURES
    return encoder


def trained(method, rounds=2, **options):
    """The engine and all states, under compiled steps."""
    engine = VectorizedEngine(forward="vmap", compile=True)
    return engine, states(method, rounds, engine, **options)


def plain(method, rounds=2, **options):
    """The same under steps that are not compiled; the draws of dropout are the same, too."""
    return states(method, rounds, VectorizedEngine(forward="vmap"), **options)


def states(method, rounds, engine, **options):
    options.setdefault("data", Toy(LABELS))
    return whole_state(run(method, rounds, engine=engine, loop=FederatedLoop(), **options))


def number_of_graphs(engine):
    return sum(len(steps.graphs) for phases in engine._computations._compiled.values() for steps in phases.values())


ALIKE = [pytest.param(method, marks=pytest.mark.slow) for method in (FedBN, FedProx)]  # FedPAC's steps have more


@pytest.mark.parametrize("method", [FedPAC, FedRoD, partial(DualFed, contrastive=1.0), *ALIKE])
def test_compiled_steps_agree(method, early):
    """Fits of clients with unequal numbers of batches, in several phases, with features in place of inputs."""
    options = {"encoder": dropout_and_norm}
    engine, got = trained(partial(method, lr=0.005, epochs=2), **options)
    assert not engine._warned
    assert number_of_graphs(engine) >= 2
    assert_same(got, plain(partial(method, lr=0.005, epochs=2), **options), atol=1e-5)


@pytest.mark.slow
def test_compiled_steps_agree_in_double_precision_and_under_autocast(early):
    for precision, atol in (("64-true", 1e-9), ("bf16-mixed", 1e-3)):
        engine, got = trained(partial(FedPAC, lr=0.01), precision=precision)
        assert not engine._warned
        assert number_of_graphs(engine) >= 2
        assert_same(got, plain(partial(FedPAC, lr=0.01), precision=precision), atol=atol)


@pytest.mark.slow
def test_inductor_agrees(monkeypatch):
    """The one test that compiles: the whole stack with whole batches."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(3))
    except Exception as error:
        pytest.skip(f"inductor does not compile here: {type(error).__name__}: {error}")
    monkeypatch.setattr(steps, "USES", 2)
    monkeypatch.setattr(steps, "MAX_GRAPHS", 1)
    options = {"encoder": dropout_and_norm, "data": Toy([[0, 1] * 4, [1, 2] * 4])}
    engine, got = trained(partial(FedAvg, lr=0.01, epochs=3), 1, **options)
    assert not engine._warned
    assert number_of_graphs(engine) == 1
    assert_same(got, plain(partial(FedAvg, lr=0.01, epochs=3), 1, **options), atol=1e-5)


def test_graphs_serve_all_rounds(early):
    data = Toy([[0, 1] * 4, [0, 1] * 4])
    engine, _ = trained(partial(FedPAC, epochs=1), 6, data=data)
    # The head's phase, on features, and the encoder's.
    assert len(early) == number_of_graphs(engine) == 2
    assert number_of_graphs(pickle.loads(pickle.dumps(engine))) == 0
    assert number_of_graphs(copy.deepcopy(engine)) == 0


@pytest.mark.slow
def test_graphs_end_with_their_module(early):
    engine = VectorizedEngine(forward="vmap", compile=True)
    federation = run(partial(FedPAC, lr=0.01), 2, engine=engine)
    assert number_of_graphs(engine) > 0
    alive = weakref.ref(federation.clients.models[0])
    del federation
    gc.collect()
    assert alive() is None
    assert number_of_graphs(engine) == 0


# ---------------------------------------------------------------------- what graphs would take for constants


class Factor(FedAvg):
    """Multiplies the loss by an attribute."""

    factor = 1.0

    def loss_terms(self, features, labels):
        return {"scaled": self.factor * super().loss_terms(features, labels)["cross_entropy"]}


class Doubles(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        for model in pl_module.clients.models:
            model.factor = 2.0**trainer.current_epoch


def test_attributes_that_change_between_rounds_make_other_graphs(early):
    engine, got = trained(partial(Factor, lr=0.01), 3, callbacks=[Doubles()])
    assert not engine._warned
    assert_same(got, plain(partial(Factor, lr=0.01), 3, callbacks=[Doubles()]), atol=1e-6)


class Draws(FedAvg):
    """Draws from Python's generator."""

    def loss_terms(self, features, labels):
        return {"scaled": random.random() * super().loss_terms(features, labels)["cross_entropy"]}


class LooksAtIndex(FedAvg):
    def training_step(self, batch, batch_idx):
        terms = super().training_step(batch, batch_idx)
        return {"loss": terms["loss"] * (1 + batch_idx)}


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Draws, "training_step draws from Python's or NumPy's generator"),
        (LooksAtIndex, "LooksAtIndex.training_step uses the number of the batch"),
    ],
)
def test_what_a_graph_would_do_only_once_is_not_compiled(method, reason, early):
    random.seed(3)
    engine, got = trained(partial(method, lr=0.01))
    (line,) = engine._warned
    assert line.startswith(reason)
    random.seed(3)
    assert_same(got, plain(partial(method, lr=0.01)))


def test_without_a_compiler_steps_are_not_compiled(early, monkeypatch):
    def broken(*inputs):
        raise RuntimeError("there is\nno compiler")

    monkeypatch.setattr(steps, "compile_graph", lambda graph: broken)
    options = {"encoder": normed_encoder}
    engine, got = trained(FedPAC, **options)
    assert engine._warned == {"torch.compile failed (RuntimeError: there is no compiler); going on without compiling"}
    assert_same(got, plain(FedPAC, **options))


def test_memory_errors_are_not_taken_for_a_failed_compilation(early, monkeypatch):
    """They halve the group."""

    def large(*inputs):
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(steps, "compile_graph", lambda graph: large)
    engine, got = trained(FedAvg)
    assert "3 clients at once need too much memory; going on with 2 at once" in engine._warned
    assert_same(got, plain(FedAvg), atol=1e-6)
