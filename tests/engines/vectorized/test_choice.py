"""`forward="auto"` on a device other than the CPU times both ways, takes the faster one, and keeps it."""

import json
from functools import partial

import pytest
import torch
from _helpers.toy import (
    assert_same,
    dropout_encoder,
    run,
    tiny_encoder,
    whole_state,
)
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.engines.vectorized import choice, engine
from pfl_lightning.engines.vectorized.step import StepInputs, StepOutputs
from pfl_lightning.methods import FedAvg

FIT = partial(FedAvg, lr=0.05, epochs=1)


class Clock:
    """Seconds: those of a step that was computed at once, or for one client."""

    def __init__(self, together, alone):
        self.now, self.seconds = 0.0, {False: together, True: alone}

    def __call__(self):
        return self.now


@pytest.fixture
def timed(monkeypatch):
    """Makes an engine that takes the CPU for a GPU, and whose steps take the given seconds; lists what was timed."""
    found = []

    def make(together, alone, **options):
        made, clock = VectorizedEngine(**options), Clock(together, alone)
        made.clock = clock
        measure, vectorizes = made._measure, made.vectorizes

        def elsewhere(inner, client, environment):
            class Device:
                type = "cuda"

            class There:
                device, precision = Device, environment.precision

            return inner(client, There)

        made._measure, made.vectorizes = partial(elsewhere, measure), partial(elsewhere, vectorizes)

        def seconds(compute, inputs, index, clock):
            def counted(given, index):
                clock.now += clock.seconds[given.apart]
                return compute(given, index)

            found.append(choice.seconds_of_step(counted, inputs, index, clock))
            return found[-1]

        monkeypatch.setattr(engine, "seconds_of_step", seconds)
        return made

    make.found = found
    return make


def test_both_ways_are_timed_and_nothing_is_changed():
    clock, seen = Clock(0.008, 0.003), []

    def compute(inputs, index):
        clock.now += clock.seconds[inputs.apart]
        seen.append((len(inputs.batch[0]), inputs.apart, inputs.in_place))
        inputs.others["buffer"].add_(torch.rand(()))
        return StepOutputs({"loss": torch.ones(len(inputs.batch[0]))}, {}, {})

    given = StepInputs({"weight": torch.ones(4, 2)}, {"buffer": torch.zeros(4, 3)}, (torch.ones(4, 5),))
    state = torch.get_rng_state()
    assert choice.seconds_of_step(compute, given, 0, clock) == pytest.approx((0.008, 4 * 0.003))
    assert torch.equal(torch.get_rng_state(), state)
    assert not given.others["buffer"].any()
    assert set(seen) == {(4, False, False), (1, True, False)}


@pytest.mark.parametrize("encoder", [tiny_encoder, dropout_encoder])
def test_the_faster_way_is_taken_once_for_all(timed, encoder):
    plain = run(FIT, 2, encoder=encoder, engine=VectorizedEngine(forward="vmap"))
    at_once = run(FIT, 2, encoder=encoder, engine=timed(0.004, 0.001))  # five clients
    assert set(at_once.engine.choices.values()) == {"vmap"}
    assert not at_once.engine._warned
    assert_same(whole_state(at_once), whole_state(plain))  # bit for bit: nothing of the trial is left
    one_by_one = run(FIT, 2, encoder=encoder, engine=timed(0.006, 0.001))
    assert set(one_by_one.engine.choices.values()) == {"loop"}
    (line,) = one_by_one.engine._warned
    assert "a step of 5 clients of Sequential" in line
    assert "takes 6 ms at once and 5 ms sequentially. Its clients run one by one" in line
    assert_same(whole_state(one_by_one), whole_state(run(FIT, 2, encoder=encoder, engine=SequentialEngine())))
    assert len(timed.found) == 2


@pytest.mark.parametrize("first", ["vmap", "loop"])
def test_a_resumed_run_goes_the_same_way_and_results_tell_it(timed, first, tmp_path):
    slow, fast = (0.009, 0.001), (0.001, 0.001)
    begins = timed(*(fast if first == "vmap" else slow))
    run(FIT, 1, engine=begins, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    other = timed(*(slow if first == "vmap" else fast))
    writer = ResultsWriter(dirpath=str(tmp_path))
    resumed = run(FIT, 2, engine=other, callbacks=[writer], ckpt_path=tmp_path / "last.ckpt")
    assert other.choices == begins.choices
    assert set(other.choices.values()) == {first}
    assert len(timed.found) == 1
    assert json.loads((tmp_path / "results.json").read_text())["engine_choices"] == other.choices
    kind = VectorizedEngine(forward="vmap") if first == "vmap" else SequentialEngine()
    assert_same(whole_state(resumed), whole_state(run(FIT, 2, engine=kind)))


@pytest.mark.parametrize("forward", ["vmap", "loop"])
def test_what_is_set_is_not_timed(timed, forward):
    federation = run(FIT, 1, engine=timed(0.009, 0.001, forward=forward))
    assert not timed.found
    assert not federation.engine.choices
    assert not federation.engine._warned


def test_nothing_is_timed_where_results_must_be_the_same(timed):
    torch.use_deterministic_algorithms(True)
    try:
        federation = run(FIT, 1, engine=timed(0.009, 0.001))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not timed.found
    assert not federation.engine.choices


def test_another_way_is_refused_by_name():
    with pytest.raises(ValueError, match="forward"):
        VectorizedEngine(forward="faster")
