"""Seeds depend on who draws and why, on nothing else."""

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from pfl_lightning import seeding
from pfl_lightning.seeding import (
    DataStream,
    GeneratorStates,
    Purpose,
    derive_seed,
    global_seed,
    seeded_generator,
    torch_seed,
)

PURPOSES = {
    "INITIAL_WEIGHTS": "initial weights",
    "PARTNER_WEIGHTS": "partner weights",
    "COHORT": "cohort",
    "EVAL_CLIENTS": "evaluated clients",
    "FIT": "fit",
    "FIT_MODEL": "fit/model",
    "PERSONALIZE": "personalize",
    "PERSONALIZE_MODEL": "personalize/model",
    "PERSONALIZE_HEAD": "personalize/head",
    "EVALUATION_MODEL": "evaluation/model",
    "EVALUATION_STEPS": "evaluation/steps",
    "SERVER": "server",
    "SERVER_BATCHES": "server batches",
    "FURTHER_WEIGHTS": "further weights",
    "FIRST_CLUSTER": "first cluster",
    "FOMO_MODELS": "FedFomo models",
    "PUBLIC": "public",
    "VIRTUAL_FEATURES": "virtual features",
    "INSPECTION": "inspection",
    "INSPECTED_CLIENTS": "inspected clients",
    "INSPECTED_SAMPLES": "inspected samples",
    "PRIVATE_COHORT": "private cohort",
    "PRIVATE_NOISE": "private noise",
    "TSNE": "t-SNE",
    "DEVICES": "devices",
}
STREAMS = ["RULE", "TEST", "VALIDATION", "POOL", "QUANTITY", "SHIFT", "NOVEL", "UNLABELED", "PUBLIC"]


def test_purposes_stay_the_same_from_release_to_release():
    """Add purposes here; a changed one breaks checkpoints."""
    assert {purpose.name: purpose.value for purpose in Purpose} == PURPOSES
    assert [stream.name for stream in sorted(DataStream)] == STREAMS
    assert sorted(DataStream) == list(range(len(STREAMS)))


def test_a_purpose_counts_as_its_value():
    for purpose in Purpose:
        assert derive_seed(5, purpose, 1) == derive_seed(5, purpose.value, 1)
    for stream in DataStream:
        drawn = np.random.default_rng([3, stream, 2]).integers(2**63)
        assert drawn == np.random.default_rng([3, int(stream), 2]).integers(2**63)


def test_seeds_are_distinct():
    purposes = ["fit/0", "fit/1", "fit/model", "personalize/0", "cohort"]
    keys = list(itertools.product([0, 1, 2], purposes, range(20), range(20)))
    seeds = {derive_seed(seed, purpose, round, client) for seed, purpose, round, client in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_stay_the_same_from_release_to_release():
    """These numbers are a promise: change them, and no run of before can be resumed or repeated."""
    assert derive_seed(0, "fit/0", 0, 0) == GOLDEN[0]
    assert derive_seed(7, "cohort", 12) == GOLDEN[1]
    drawn = torch.randperm(8, generator=seeded_generator(3, "fit/0", 1, 2)).tolist()
    assert drawn == GOLDEN[2]


GOLDEN = (956361403371686601, 1564422456202752398, [3, 7, 6, 4, 5, 0, 2, 1])


def test_streams_are_not_shifted_copies():
    first = torch.rand(1000, generator=seeded_generator(0, "fit/0", 0, 0))
    second = torch.rand(1000, generator=seeded_generator(0, "fit/0", 0, 1))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.15
    assert not set(first.tolist()) & set(second.tolist())


def test_torch_seed_restores_what_was_there():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with torch_seed(9):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with torch_seed(9):
        assert torch.equal(torch.rand(2), inside)

    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="inside"), torch_seed(9):
        raise RuntimeError("inside")
    assert torch.equal(torch.rand(2), expected)


def test_global_seed(monkeypatch):
    assert global_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    seed_everything(17, verbose=False)
    assert global_seed() == 17


def test_a_seeded_block_draws_as_after_manual_seed_without_a_look_at_the_stack(monkeypatch):
    before = torch.random.get_rng_state()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.random.set_rng_state(before)
    if not torch.accelerator.is_available():
        monkeypatch.setattr("traceback.format_stack", lambda *args: pytest.fail("a stack was formatted"))
    with torch_seed(5):
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.random.get_rng_state(), before)


class Generators:
    """Module of a device that is not there, with a generator for each number."""

    def __init__(self, count, used=True):
        self.states, self.device_count, self.is_initialized = [7] * count, lambda: count, lambda: used

    def get_rng_state(self, device=None):
        return torch.tensor(self.states[0 if device is None else device.index])

    def set_rng_state(self, state, device=None):
        self.states[0 if device is None else device.index] = int(state)


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 2), ("mps", 1)])
def test_generators_of_every_kind_of_device_are_put_back(kind, count, monkeypatch):
    module = Generators(count)
    monkeypatch.setattr(seeding, "_has_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: module.states.__setitem__(slice(None), [seed] * count))
    with torch_seed(3):
        assert module.states == [3] * count
    assert module.states == [7] * count
    before = GeneratorStates.read(torch.device(kind, 0))
    module.states[0] = 8
    assert not GeneratorStates.read(torch.device(kind, 0)).is_as(before)
    before.restore(torch.device(kind, 0))
    assert module.states == [7] * count


def test_a_gpu_that_is_not_used_is_not_touched(monkeypatch):
    module = Generators(2, used=False)
    monkeypatch.setattr(seeding, "_has_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    started = []
    module.get_rng_state = started.append  # which starts it
    with torch_seed(3):
        assert not started
    assert not started
