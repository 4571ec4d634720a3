"""A plain loop of a method ends where the package's round does, so that their times may be compared."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
METHODS = ["GPFL", "PFedHN", "DCPFL", "DualFed", "Calibre"]


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


def test_every_loop_is_tried(script):
    assert list(script.LOOPS) == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_loop_ends_where_the_package_does(script, name):
    if name == "Calibre":
        pytest.importorskip("lightly")
    found = script.compared(name, tiny(script), 2, "64-true")
    assert not found.unequal
    assert found.largest < 1e-6
    assert len(found.ratios) == 1
    server, clients = found.loop.state()
    assert len(server) > 3
    assert len(clients) == 2


def test_other_work_is_noticed(script, monkeypatch):
    other = type("Other", (script.DualFed,), {"first_stage": lambda loop, client, round: None})
    monkeypatch.setitem(script.LOOPS, "DualFed", other)
    unequal = script.compared("DualFed", tiny(script), 1, "64-true").unequal
    assert {"server: encoder.features.1.weight", "client 0: projector.0.weight", "client 1: head.weight"} <= unequal


def test_what_only_one_side_keeps_is_noticed(script):
    beside = script.Beside(script.DualFed, 1)
    beside.compare("server", {}, {"weight": script.torch.zeros(1)})
    assert beside.unequal == {"server: weight"}


def test_a_median_has_its_quartiles(script):
    assert script.shown([1.0, 1.2, 1.1]) == "1.10 (1.05 to 1.15)"
    assert script.shown([1.04]) == "1.04"
