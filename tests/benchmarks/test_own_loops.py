"""A plain loop of a method ends where the package's round does, so that their times may be compared."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
METHODS = ["PerFedAvg", "GPFL", "PFedHN", "DCPFL", "DualFed", "PFLSSL", "FedEMA", "Calibre"]
SELF_SUPERVISED = ("PFLSSL", "FedEMA", "Calibre")


@pytest.fixture
def script(monkeypatch):
    """The benchmark, whose neighbors are imported as when it is run as a script."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("own_loops")
    for name in set(sys.modules) - known:
        if name.split(".")[0] in ("own_loops", "plain_loop", "loops"):
            del sys.modules[name]


def tiny(script):
    """Two clients of 54 training images: one batch of 50 and one of 4."""
    return script.Workload(samples=60, epochs=1, clients=2)


def need(name):
    """Skip what cannot run here."""
    if name in SELF_SUPERVISED:
        pytest.importorskip("lightly")


def test_every_loop_is_tried(script):
    assert list(script.LOOPS) == METHODS


@pytest.mark.repeated
@pytest.mark.parametrize("name", METHODS)
def test_a_loop_ends_where_the_package_does(script, name):
    need(name)
    rounds = script.PROOF.get(name, 2)
    found = script.compared(name, tiny(script), rounds, "64-true")
    assert not found.unequal
    assert found.largest < 1e-6
    assert len(found.ratios) == rounds - 1
    server, clients = found.loop.state()
    assert len(server) > 3
    assert len(clients) == 2


def test_other_work_is_noticed(script, monkeypatch):
    other = type("Other", (script.DualFed,), {"first_stage": lambda loop, client, round: None})
    monkeypatch.setitem(script.LOOPS, "DualFed", other)
    unequal = script.compared("DualFed", tiny(script), 1, "64-true").unequal
    assert {"server: encoder.features.1.weight", "client 0: projector.0.weight", "client 1: head.weight"} <= unequal


@pytest.mark.parametrize(
    ("name", "place", "constant", "other"),
    [
        ("PerFedAvg", "per_fedavg", "ALPHA", 0.0),
        ("PFLSSL", "pfl_ssl", "TEMPERATURE", 0.25),
        ("FedEMA", "fedema", "MOMENTUM", 1.0),
    ],
)
def test_another_constant_is_noticed(script, monkeypatch, name, place, constant, other):
    need(name)
    monkeypatch.setattr(importlib.import_module(f"loops.{place}"), constant, other)
    assert "server: encoder.convolutions.3.weight" in script.compared(name, tiny(script), 2, "64-true").unequal


def test_a_mixture_without_the_divergence_is_noticed(script, monkeypatch):
    need("FedEMA")
    mix = script.FedEMA.mix

    def always_tau(loop, own):
        known, own.first_divergence = own.first_divergence, 0.0
        mix(loop, own)
        own.first_divergence = known or own.first_divergence

    monkeypatch.setattr(script.FedEMA, "mix", always_tau)
    unequal = script.compared("FedEMA", tiny(script), script.PROOF["FedEMA"], "64-true").unequal
    assert {"client 0: own.encoder.features.1.weight", "server: predictor.0.weight"} <= unequal


def test_names_are_those_of_the_loops(script):
    names = {
        "encoder.features.1.weight": "encoder.features.1.weight",
        "objective.projector.layers.0.weight": "projector.0.weight",
        "objective.predictor.layers.3.bias": "predictor.3.bias",
        "own.objective/projector/layers/0/weight": "own.projector.0.weight",
        "objective.target.copies.0.features.1.bias": "target.encoder.features.1.bias",
        "objective.target.copies.1.layers.1.running_mean": "target.projector.1.running_mean",
        "outputs.encoder/features/1/weight.bias": "outputs.encoder/features/1/weight.bias",
    }
    assert {name: script.plain_name(name) for name in names} == names


def test_what_only_one_side_keeps_is_noticed(script):
    beside = script.Beside(script.DualFed, 1)
    beside.compare("server", {}, {"weight": script.torch.zeros(1)})
    assert beside.unequal == {"server: weight"}


def test_a_median_has_its_quartiles(script):
    assert script.shown([1.0, 1.2, 1.1]) == "1.10 (1.05 to 1.15)"
    assert script.shown([1.04]) == "1.04"
