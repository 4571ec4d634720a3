"""Few layers stand between a user and a local step."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "step_stack.py"
MAX_COMMAND, MAX_USER = 7, 12


def test_files_on_the_stack_of_a_step():
    spec = importlib.util.spec_from_file_location("step_stack", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    command, user = script.command_step(), script.user_step()
    assert "pfl_lightning/client/base.py" in command
    assert "pfl_lightning/drop_in/fits/local_fit.py" in user
    assert len(command) <= MAX_COMMAND, command
    assert len(user) <= MAX_USER, user
