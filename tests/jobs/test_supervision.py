"""Jobs that run at once, and what ends them."""

from contextlib import closing
from pathlib import Path

import pytest

from pfl_lightning.jobs import supervision
from pfl_lightning.jobs.supervision import Job, Jobs

JOBS = [Job(("fit", str(number)), Path("log.txt")) for number in range(4)]


class Process:
    """One that ends after some looks, or when it is asked to."""

    def __init__(self, looks, obeys=True):
        self.looks, self.obeys, self.code = looks, obeys, None

    def poll(self):
        self.looks -= 1
        return self.code if self.code is not None else 0 if self.looks < 0 else None

    def stop(self):
        self.code = -15 if self.obeys else None

    def kill(self):
        self.code = -9


class Starter:
    def __init__(self, *processes):
        self.waiting, self.started = list(processes), []

    def __call__(self, job):
        self.started.append(job)
        return self.waiting.pop(0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(supervision, "POLL", 0.001)
    monkeypatch.setattr(supervision, "AGAIN", 0.01)


def test_as_many_at_once_as_there_is_room_for():
    starter = Starter(*(Process(looks) for looks in (3, 1, 1, 0)))
    jobs = Jobs(starter, 2)
    found = [ended for ended in jobs.run(iter(JOBS)) if ended is not None]
    assert found == [(JOBS[number], 0) for number in (1, 0, 2, 3)]
    assert starter.started == JOBS


def test_a_job_is_asked_for_again_while_there_is_none():
    starter = Starter(Process(0))
    assert (JOBS[0], 0) in list(Jobs(starter).run(iter([None, None, JOBS[0]])))


@pytest.mark.parametrize(("obeys", "code"), [(True, -15), (False, -9)])
def test_a_job_that_is_ended_early_and_does_not_obey_is_killed(monkeypatch, obeys, code):
    monkeypatch.setattr(supervision, "GRACE", 0.02)
    jobs, found = Jobs(Starter(Process(10**6, obeys))), []
    for ended in jobs.run(iter(JOBS[:1])):
        if ended is not None:
            found.append(ended)
        elif not found and not jobs._deadlines:
            jobs.end(JOBS[0])
    assert found == [(JOBS[0], code)]


def test_what_runs_is_ended_when_nobody_looks_any_more():
    process = Process(10**6)
    with closing(Jobs(Starter(process)).run(iter(JOBS))) as events:
        next(events)
    assert process.code == -15
