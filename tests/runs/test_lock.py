"""A run's folder is locked while it is trained, and no longer: the lock goes with its process."""

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from pfl_lightning.errors import RunLockedError
from pfl_lightning.runs import lock as run_lock
from pfl_lightning.runs.lock import RunLock, keep_lock

HOLDER = """
import sys, time
from pfl_lightning.runs.lock import RunLock
lock = RunLock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_process_hears_who_holds_the_run_until_that_one_is_killed(tmp_path, holder):
    who = f"{re.escape(str(tmp_path))} is being trained by process {holder.pid} on {socket.gethostname()}: wait"
    with pytest.raises(RunLockedError, match=who):
        RunLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").exists()
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_second_lock_of_one_process_is_refused_too(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:  # lives until its parent lets it go
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    try:
        lock.release()
        with RunLock(tmp_path):
            assert (tmp_path / ".lock").exists()
    finally:
        os.close(there)
        os.waitpid(child, 0)
        os.close(here)


def test_a_file_that_its_holder_removes_meanwhile_is_not_the_lock(tmp_path, monkeypatch):
    flock, removed = run_lock.fcntl.flock, []

    def late(descriptor, how):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        flock(descriptor, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", late)
    with RunLock(tmp_path), pytest.raises(RunLockedError):
        RunLock(tmp_path)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_lock_that_leads_elsewhere_is_refused_and_nothing_there_is_changed(tmp_path, dangling):
    run, elsewhere = tmp_path / "run", tmp_path / "id_rsa"
    run.mkdir()
    if not dangling:
        elsewhere.write_text("secret")
    (run / ".lock").symlink_to(elsewhere)
    with pytest.raises(OSError, match=rf"symbolic links: '{re.escape(str(run))}/\.lock'"):
        RunLock(run)
    assert elsewhere.exists() is not dangling
    assert dangling or elsewhere.read_text() == "secret"
    (run / ".lock").unlink()
    with RunLock(run):
        assert (run / ".lock").is_file()


@pytest.mark.parametrize("instead", [False, True], ids=["removed", "a file"])
def test_a_folder_that_is_gone_is_released(tmp_path, instead):
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(folder) as lock:
        shutil.rmtree(folder)
        if instead:
            folder.touch()
    assert not lock.is_held


def test_a_folder_that_was_removed_is_locked_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(folder):
        keep_lock(folder)
        (folder / ".lock").unlink()
        keep_lock(folder)
        with pytest.raises(RunLockedError):
            RunLock(folder)
        shutil.rmtree(folder)
        keep_lock(folder)
        with pytest.raises(RunLockedError):
            RunLock(folder)
    assert list(folder.iterdir()) == []
    keep_lock(folder)  # which nobody has locked


def test_a_folder_that_another_process_has_locked_since_is_not_taken_from_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with RunLock(folder):
        with pytest.raises(RunLockedError, match="is being trained by"):
            lock.keep()
        lock.release()
        assert (folder / ".lock").exists()
    keep_lock(folder)


def test_without_locks_the_run_goes_on_and_says_so(tmp_path, monkeypatch):
    def unknown(descriptor, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", unknown)
    with pytest.warns(
        UserWarning, match=r"cannot be locked \(Function not implemented\): make sure that no other process"
    ):
        lock = RunLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
