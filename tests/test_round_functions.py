"""A round stays short enough to be read."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "round_functions.py"
MAX_FUNCTIONS, MAX_FILES = 100, 20


def test_functions_and_files_of_a_round(monkeypatch):
    spec = importlib.util.spec_from_file_location("round_functions", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # its dataclass looks for its module
    spec.loader.exec_module(script)
    functions = script.count_functions()
    names = {function.name for function in functions}
    assert {"Round.fit_next", "Round.close", "AveragingAggregator.aggregate", "SequentialEngine.run_phase"} <= names
    assert not {"Federation.setup", "FederatedDataModule.setup"} & names
    files = {function.file for function in functions}
    assert len(functions) <= MAX_FUNCTIONS, sorted(functions)
    assert len(files) <= MAX_FILES, sorted(files)
