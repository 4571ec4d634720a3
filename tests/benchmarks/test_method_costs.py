"""What the script of methods' costs asks of a federation, it is told."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pfl_lightning.cli.methods import read_costs
from pfl_lightning.methods import FedAvg, FedProto

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("method_costs", FOLDER / "method_costs.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(("method", "expected"), [(FedAvg, False), (FedProto, True)])
def test_which_methods_take_unequal_encoders(script, method, expected):
    assert script.takes_unequal_encoders(method) is expected


def test_a_method_that_became_slower_is_named_where_a_second_measurement_shows_it_too(script):
    kept = read_costs()["FedAvg"]
    same = replace(kept, overhead=kept.overhead + 0.05, overhead_long=None)
    slow = replace(kept, overhead=kept.overhead + 0.2)
    assert script.regressions(same, kept) == []
    said = f"FedAvg, few steps: {slow.overhead:.2f} times its passes in a plain loop, {kept.overhead:.2f} in the kept"
    for rows, found in (((same,), False), ((slow, same), False), ((slow, slow), True)):
        measured = iter(rows)
        lines = script.compared(FedAvg, None, 1, measure=lambda *given, measured=measured: next(measured))
        assert bool(lines) is found
        assert all(line.startswith(said) for line in lines)


@pytest.mark.slow
def test_no_method_became_slower_than_the_kept_figures_say():
    """As ratios to a plain loop beside each round, so that the machine decides little; in a process of one thread."""
    names = ["FedAvg", "FedPer", "FedPAC", "Ditto", "FedProto", "SCAFFOLD"]
    command = [sys.executable, str(FOLDER / "method_costs.py"), "--compare", "--repetitions", "5", "--methods", *names]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none of 6 methods became slower" in done.stdout
