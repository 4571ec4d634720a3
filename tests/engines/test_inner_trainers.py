"""What inner Trainers do at less cost is the same as before."""

import signal
from functools import partial
from typing import Any, ClassVar

import pytest
from _helpers.toy import run
from lightning.pytorch.profilers import PassThroughProfiler

from pfl_lightning import TrainerEngine
from pfl_lightning.engines.trainer import NothingProfiled
from pfl_lightning.methods import FedAvg


class Noting(FedAvg):
    """Notes the profiler and the handler of SIGTERM of each local fit, and changes another signal's."""

    seen: ClassVar[list[Any]] = []

    def on_train_start(self):
        self.seen.append((self.trainer.profiler, *map(signal.getsignal, (signal.SIGTERM, signal.SIGUSR1))))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def test_handlers_of_signals_are_as_before():
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = {number: signal.getsignal(number) for number in numbers}
    Noting.seen.clear()
    run(partial(Noting, lr=0.05, epochs=1), engine=TrainerEngine())
    assert {number: signal.getsignal(number) for number in numbers} == before
    assert len(Noting.seen) == 5
    for found, handler, other in Noting.seen:
        assert other == before[signal.SIGUSR1]  # after the client before
        assert type(found) is NothingProfiled
        assert callable(handler)


def test_nothing_is_profiled_without_a_word():
    profiler = NothingProfiled()
    assert isinstance(profiler, PassThroughProfiler)
    with profiler.profile("one"), profiler.profile("two"), pytest.raises(ZeroDivisionError), profiler.profile("three"):
        _ = 1 / 0
    assert profiler.summary() == ""
