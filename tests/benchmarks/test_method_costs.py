"""What the script of methods' costs asks of a federation, it is told."""

import importlib.util
import sys
from pathlib import Path

import pytest

from pfl_lightning.methods import FedAvg, FedProto

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("method", "expected"), [(FedAvg, False), (FedProto, True)])
def test_which_methods_take_unequal_encoders(monkeypatch, method, expected):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("method_costs", FOLDER / "method_costs.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    assert script.takes_unequal_encoders(method) is expected
