"""The choice of an objective by name or factory, and the error where lightly is missing."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from _helpers.toy import tiny_encoder

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import PFLSSL, Calibre, FedEMA
from pfl_lightning.self_supervised import OBJECTIVES, Objective, SimCLR, make_objective

METHODS = pytest.mark.parametrize("method", [PFLSSL, Calibre])


@pytest.mark.parametrize("name", OBJECTIVES)
@METHODS
def test_by_name(method, name):
    assert type(method(tiny_encoder((6,)), 5, objective=name).objective) is OBJECTIVES[name]


@METHODS
def test_by_what_makes_it(method):
    class Mine(Objective):
        def __init__(self, encoder):
            super().__init__(encoder)
            self.projector = torch.nn.Linear(self.in_features, 3)

    assert isinstance(method(tiny_encoder((6,)), 5, objective=Mine).objective, Mine)
    small = method(tiny_encoder((6,)), 5, objective=partial(SimCLR, out=7)).objective
    assert small.out == 7


@METHODS
def test_what_is_no_objective_is_refused(method):
    with pytest.raises(ValueError, match=r"objective must be one of \('simclr', 'byol', .*got 'simcrl'"):
        method(tiny_encoder((6,)), 5, objective="simcrl")
    with pytest.raises(ConfigurationError, match=r"objective must be one of .*it made a Linear"):
        method(tiny_encoder((6,)), 5, objective=lambda encoder: torch.nn.Linear(2, 2))


@pytest.fixture
def _without_lightly(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightly", None)


@pytest.mark.usefixtures("_without_lightly")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_lightly_an_objective_says_what_to_install(name):
    message = rf"{OBJECTIVES[name].__name__} needs the package lightly.*pip install 'pfl-lightning\[ssl\]'"
    with pytest.raises(ConfigurationError, match=message):
        make_objective(name, tiny_encoder((6,)))


@pytest.mark.usefixtures("_without_lightly")
def test_without_lightly_a_client_says_what_to_install():
    for method in (PFLSSL, Calibre, FedEMA):
        with pytest.raises(ConfigurationError, match=r"pip install 'pfl-lightning\[ssl\]'"):
            method(tiny_encoder((6,)), 5)


@pytest.mark.slow
def test_the_package_is_imported_without_lightly():
    """Run in a new process, where nothing has imported lightly yet."""
    program = """
import sys
sys.modules["lightly"] = None
import pfl_lightning.methods, pfl_lightning.self_supervised, pfl_lightning.cli
print(pfl_lightning.methods.Calibre.citation.year)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (0, "2024"), done.stderr
