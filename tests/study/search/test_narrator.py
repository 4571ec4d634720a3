"""What a search says while its trials run."""

import pytest

from pfl_lightning.study.search.narrator import Narrator
from pfl_lightning.study.search.report import TriedOptions


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("pfl_lightning.study.search.narrator.time.monotonic", lambda: now[0])
    return now


def test_a_line_a_minute_about_trials_that_run(clock):
    said = []
    narrator = Narrator(trials=4, rounds=20, processes=2, say=said.append)
    for number, played in ((0, 1), (1, 1), (0, 2), (1, 2)):
        clock[0] += 40
        narrator.round(number, played, 0.5)
    assert said == ["trial 1: round 1/20, validation 50.00 %", "trial 1: round 2/20, validation 50.00 %"]


def test_the_time_left_is_of_the_trials_that_this_call_has_played(clock):
    said = []
    narrator = Narrator(trials=4, rounds=20, processes=2, say=said.append)
    before = TriedOptions(0, "complete", 0.75, {"a.lr": 0.1}, 20)
    failed = TriedOptions(1, "fail", None, {"a.lr": 0.2}, 0)
    narrator.ended(failed, [before, failed], 30.0)
    now = TriedOptions(2, "complete", 0.5, {"a.lr": 0.123456}, 20)
    narrator.ended(now, [before, failed, now], 90.0)
    assert said == [
        "trial 1 failed with lr=0.2 (1 of 4 done, best 75.00 % by trial 0, about 45 s left)",
        "trial 2 done, validation 50.00 %, with lr=0.1235 (2 of 4 done, best 75.00 % by trial 0, about 60 s left)",
    ]
