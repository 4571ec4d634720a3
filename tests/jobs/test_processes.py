"""Jobs in processes on this machine: how they are started, how they end, what their logs say."""

import os
import signal

import pytest

from pfl_lightning.jobs.processes import LocalProcess, end_with_parent, environment, last_lines
from pfl_lightning.jobs.supervision import Job


def test_a_child_ends_when_its_parent_has_gone(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    reads, writes = os.pipe()
    os.close(writes)
    end_with_parent(reads)
    os.close(reads)
    assert sent == [(os.getpid(), signal.SIGTERM), (os.getpid(), signal.SIGKILL)]


def test_the_environment_of_a_run():
    found = environment(2, {"SLURM_JOB_ID": "17", "HOME": "/home"})
    assert found == {"HOME": "/home", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("--- 2026-11-22 pfl fit\npfl: old\n--- 2026-11-22 pfl fit\nwords\n\npfl: new\n(PFL_DEBUG=1)\n")
    assert last_lines(log) == "pfl: new\n(PFL_DEBUG=1)"
    log.write_text("--- 2026-11-22 pfl fit\n" + "\n".join(f"line {n}" for n in range(20)))
    assert last_lines(log, 2) == "line 18\nline 19"
    assert Job(("fit",), log).arguments[1:] == [
        "-m",
        "pfl_lightning.jobs.processes",
        "pfl_lightning.cli.main:main",
        "fit",
    ]


def test_a_log_that_leads_elsewhere_is_not_written(tmp_path):
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "log.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"log\.txt"):
        LocalProcess(Job(("fit",), tmp_path / "log.txt"))
    assert (tmp_path / "elsewhere").read_text() == "kept"
