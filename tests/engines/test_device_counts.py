"""What a GPU would wait for beside training steps stays small, whatever the model; counted on the pretended device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

TESTS = Path(__file__).parents[1]
LAUNCHES, SYNCS, COPIES = 36, 3, 4
MANY = 40
"""Launches of a model of more than a hundred tensors."""

ENGINES = ("sequential", "vectorized")

CLIENTS = 8
SMALL = {"sizes": [4] * CLIENTS, "batch_size": 2}
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch has no devices that are made in Python",
)


def run(*words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def beyond(found, launches=LAUNCHES):
    """What is beyond the limits for a client and round beside its steps, by name."""
    assert found["step"]["launches"] > 20  # so that it was seen
    beside = found["beside"]
    limits = {"launches": launches, "syncs": SYNCS + 1 / CLIENTS, "copies": COPIES}  # a wait for the round: the growth
    counted = {**beside, "copies": beside["h2d"] + beside["d2h"]}
    assert counted["launches"] > 0
    return {name: counted[name] for name, limit in limits.items() if counted[name] > limit}


def test_small_models():
    given = [("sequential", "FedPAC"), ("vectorized", "FedPAC"), ("sequential", "FedPer")]
    cases = [{"engine": engine, "method": method, "encoder": "mlp", **SMALL} for engine, method in given]
    found = run("-m", "_helpers.device_counts", *map(json.dumps, cases))
    assert len(found) == len(cases)
    for one in found:
        assert beyond(one) == {}
    assert all(one["step"]["syncs"] == 0 for one in found)  # the losses of an epoch come by one copy


@pytest.mark.slow
def test_a_model_of_convolutions():
    """Whose weights do not lie in memory as their shapes say."""
    cases = [{"engine": engine, "method": "FedPAC", "encoder": "fedpac_cnn", **SMALL} for engine in ENGINES]
    for one in run("-m", "_helpers.device_counts", *(json.dumps({**case, "side": 32}) for case in cases)):
        assert beyond(one) == {}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["FedPAC", "FedBN"])
def test_a_model_of_many_tensors(engine, method):
    sizes = {"sizes": [16] * CLIENTS, "batch_size": 8, "side": 32}
    case = {"engine": engine, "method": method, "encoder": "resnet18", **sizes}
    (found,) = run("-m", "_helpers.device_counts", json.dumps(case))
    assert beyond(found, MANY) == {}


def test_what_an_operation_costs():
    program = """
import json
import torch
from collections import Counter
from _helpers import device_counts, other_device
other_device.install()
found = []
def watch(*operation):
    kind, number = device_counts.cost(*operation)
    if number:
        counts[kind] += number
with other_device.OtherDevice():
    here, there = torch.ones(4), torch.ones(4, device="pretended")
    many, mixed = [there.clone() for _ in range(60)], [there.clone(), there.long()]
    other_device.watchers.append(watch)
    for act in (lambda: here.to("pretended"), lambda: there.cpu(), lambda: there + 1, lambda: there.view(2, 2),
                lambda: there.tolist(), lambda: bool(there.sum() > 3), lambda: there[there > 0], lambda: here + 1,
                lambda: torch._foreach_add(many, 1), lambda: torch._foreach_copy_(mixed, mixed)):
        counts = Counter()
        act()
        found.append(counts)
print(json.dumps(found))
"""
    one, two = {"launches": 1}, {"launches": 2}
    assert run("-c", program) == [
        *({"h2d": 1}, {"d2h": 1}, one, {}),
        *({"syncs": 1}, {"launches": 2, "syncs": 1}, {"launches": 1, "syncs": 1}, {}),
        *(two, two),
    ]
