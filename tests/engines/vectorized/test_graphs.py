"""Captured steps: what is copied where, by an emulated graph; and the real one where there is a GPU."""

from functools import partial

import pytest
import torch
from _helpers.emulated_graph import EmulatedGraph
from _helpers.toy import FEATURES, Toy, assert_same, dropout_encoder, normed_encoder, run, whole_state
from torch import nn

from pfl_lightning import VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.engines.vectorized import graphs as steps
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import DualFed, FedAvg, FedBN, FedPAC, FedProx, FedRoD

# Whole batches of 4: clients 0 and 1 have 4 an epoch, and client 2 has 6 and a small one.
LABELS = [[0, 1] * 8, [1, 2] * 8, [0, 2] * 13]
Adam = partial(torch.optim.Adam, lr=0.01)


@pytest.fixture
def graphs(monkeypatch):
    """All emulated graphs."""
    made = []

    def make(device):
        made.append(EmulatedGraph(device))
        return made[-1]

    monkeypatch.setattr(steps, "recorder_for", lambda device: make)
    return made


def trained(method, rounds=2, labels=LABELS, engine_options=None, **options):
    """The engine and all states, under captured steps and under plain ones."""
    found = []
    for captured in (True, False):
        engine = VectorizedEngine(forward="vmap", cuda_graphs=captured, **(engine_options or {}))
        loop = FederatedLoop()
        federation = run(method, rounds, engine=engine, loop=loop, data=Toy(labels), **options)
        found += [engine, whole_state(federation)]
    engine, got, _, expected = found
    return engine, got, expected


def convolutions(input_shape):
    convolution = (nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    encoder = nn.Sequential(*convolution, nn.Linear(4 * (input_shape[0] - 2), FEATURES))
    encoder.out_features = FEATURES
    return encoder


class Assigns(FedAvg):
    """Assigns a buffer in every step, on which the next one depends."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("weight", torch.ones(()), persistent=False)

    def loss_terms(self, features, labels):
        self.weight = self.weight * 0.9
        return {"weighted": self.weight * super().loss_terms(features, labels)["cross_entropy"]}


METHODS = pytest.mark.parametrize(
    "method", [Assigns, FedPAC, FedBN, FedProx, FedRoD, partial(DualFed, contrastive=1.0)]
)


@pytest.mark.repeated
@METHODS
def test_captured_steps_agree(method, graphs):
    engine, got, expected = trained(partial(method, lr=0.005, epochs=3), encoder=convolutions)
    assert not engine._warned
    assert sum(graph.replays for graph in graphs) > 10
    assert_same(got, expected, atol=1e-6)


def test_clipped_gradients_agree(graphs):
    """Gradients are clipped in the graph's memory."""
    method = partial(FedPAC, lr=0.05, epochs=3, optimizer=Adam)
    engine, got, expected = trained(method, engine_options={"gradient_clip_val": 0.1})
    assert not engine._warned
    assert sum(graph.replays for graph in graphs) > 10
    assert_same(got, expected, atol=1e-6)


def test_fewer_clients_and_small_batches(graphs):
    """A graph for each number of clients with the same batches; the small batches of client 2 are none's."""
    trained(partial(FedAvg, epochs=2), 1)
    # All: 4 steps of whole batches, of which 3 warm up. Then client 2 is at its fifth batch, the others begin again.
    assert graphs[0].warmed_up == 3
    assert 0 < graphs[0].replays <= 8
    assert len(graphs) == 2  # three clients, and client 2 alone


# ---------------------------------------------------------------------- what is not captured


class LooksAtIndex(FedAvg):
    def training_step(self, batch, batch_idx):
        terms = super().training_step(batch, batch_idx)
        return {"loss": terms["loss"] * (1 + batch_idx)}


@pytest.mark.parametrize(
    ("method", "encoder", "reason"),
    [
        (FedAvg, dropout_encoder, "training_step draws random numbers (as in dropout); its steps run without"),
        (LooksAtIndex, normed_encoder, "LooksAtIndex.training_step uses batch_idx; its steps are"),
    ],
    ids=["dropout", "index"],
)
def test_steps_that_differ_in_more_than_tensors_are_not_captured(method, encoder, reason, graphs):
    engine, got, expected = trained(partial(method, lr=0.01), encoder=encoder)
    (line,) = engine._warned
    assert line.startswith(reason)
    assert not any(graph.replays for graph in graphs)
    assert_same(got, expected)


def test_a_capture_that_fails_ends_the_run(graphs, monkeypatch):
    """What torch computes after it is not to be trusted."""

    def fail(self, work):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(EmulatedGraph, "capture", fail)
    engine = VectorizedEngine(forward="vmap", cuda_graphs=True)
    expected = r"captured as a CUDA graph \(RuntimeError: operation not permitted when stream is capturing\): leave"
    with pytest.raises(ConfigurationError, match=expected):
        run(partial(FedAvg, epochs=3), engine=engine, loop=FederatedLoop(), data=Toy(LABELS))


def test_a_capture_without_memory_halves_the_group(graphs, monkeypatch):
    capture = EmulatedGraph.capture

    def large(self, work):
        if len(graphs) == 1:
            raise torch.OutOfMemoryError("simulated")
        return capture(self, work)

    monkeypatch.setattr(EmulatedGraph, "capture", large)
    engine, got, expected = trained(partial(FedAvg, epochs=3), 1)
    assert engine._warned == {"3 clients at once need too much memory; continuing with 2 at once"}
    assert_same(got, expected, atol=1e-6)


def test_without_cuda_the_option_has_no_effect():
    engine, got, expected = trained(FedAvg)
    assert engine._warned == {"cuda_graphs needs a CUDA device and has no effect on 'cpu'"}
    assert_same(got, expected)


# ---------------------------------------------------------------------- the real one


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@METHODS
def test_cuda_graphs_agree(method, precision):
    options = {"encoder": convolutions, "accelerator": "gpu", "devices": 1, "precision": precision}
    engine, got, expected = trained(partial(method, lr=0.005, epochs=3), **options)
    assert not engine._warned
    assert_same(got, expected, atol=1e-4 if precision == "32-true" else 2e-2)
