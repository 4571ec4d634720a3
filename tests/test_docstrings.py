"""The examples of the package's docstrings are executed."""

import doctest
import importlib
import pkgutil

import pytest

import pfl_lightning

FOUND = pkgutil.walk_packages(pfl_lightning.__path__, "pfl_lightning.")
MODULES = ["pfl_lightning", *sorted(module.name for module in FOUND)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said = []
    for example in doctest.DocTestFinder().find(module):
        runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


def test_every_public_function_of_functional_has_an_example():
    functional = importlib.import_module("pfl_lightning.functional")
    parser = doctest.DocTestParser()
    exempt = {"Clustering"}  # a named tuple, shown by kmeans
    without = [n for n in functional.__all__ if not parser.get_examples(getattr(functional, n).__doc__ or "")]
    assert set(without) <= exempt
