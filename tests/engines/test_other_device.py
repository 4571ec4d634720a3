"""On a device that is not the CPU, all is where it must be: tensors of both are never mixed, and results are the CPU's.

No GPU is needed: the device pretends (`_helpers.other_device`), and a process of its own has it. It stands in for a GPU
in what a program says of devices, not in speed, in memory, or in how kernels round. Most results are the CPU's bit by
bit; not all, for the CPU's libraries round by where a tensor lies in memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

TESTS = Path(__file__).parents[1]
ROUNDING = 1e-5
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch has no devices that are made in Python",
)


def result_of(case):
    """What the case prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "_helpers.other_device_cases", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.repeated
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "trainer"])
def test_methods(engine):
    result = result_of(engine)
    assert result["found"]
    assert {method: far for method, far in result["found"].items() if far > ROUNDING} == {}
    assert result["products"]["device"] > 1000  # so that it was used
    assert result["copied"] > 0  # data sets that batches were taken from


def test_an_augmented_stack_waits_for_no_copy_and_takes_hardly_more_launches():
    found = result_of("augmented")["found"]
    assert max(found["plain"][1], found["augmented"][1]) <= 0  # blocking copies; the first run has some once
    assert found["plain"][0] > 100
    assert found["augmented"][0] <= 1.3 * found["plain"][0]


@pytest.mark.repeated
def test_no_method_needs_double_precision_on_the_device():
    """As on Apple's MPS: what is summed in double is summed on the CPU."""
    assert result_of("without_double")["found"] == {}


@pytest.mark.repeated
@pytest.mark.parametrize("case", ["resumed", "drop_in", "inspected", "private"])
def test_runs(case):
    result = result_of(case)
    assert result["found"]["difference"] <= ROUNDING
    assert result["found"].get("pictures", 1) > 0
    assert result["products"]["device"] > 100


def test_the_device_is_told_from_the_cpu():
    """The test would see a tensor on the wrong one."""
    program = """
import torch
from _helpers import other_device
other_device.install()
here, there = torch.ones(2), None
with other_device.OtherDevice():
    there = here.to("pretended")
    assert torch.equal((there + there).cpu(), 2 * here) and (there + torch.tensor(1.0)).device.type == "pretended"
    wrong = [lambda: here + there, lambda: here[there.long()], lambda: there.numpy(),
             lambda: torch.rand(2, generator=torch.Generator(), device="pretended"),
             lambda: torch.nn.Linear(2, 2).to("pretended")(here)]
    for attempt in wrong:
        try:
            attempt()
        except (RuntimeError, TypeError):
            continue
        raise SystemExit("nothing was refused")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
