"""Jobs in copies of a warm process: how they end, what is theirs alone, and what remains of them: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pfl_lightning.jobs import warm
from pfl_lightning.jobs.processes import LocalProcess, last_lines
from pfl_lightning.jobs.supervision import Job
from pfl_lightning.jobs.warm import WarmStarter, local_starter

TESTS = Path(__file__).parents[1]


@pytest.fixture
def starter(monkeypatch, tmp_path):
    """One whose template imports little; modules of the working directory can be imported."""
    monkeypatch.setattr(warm, "PRELOADED", ("_helpers.talkative",))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    return WarmStarter(3)


def job(name, *words, log="log.txt"):
    return Job(words, Path(log), entry=f"_helpers.job_entries:{name}")


def wait_for(condition):
    end = time.monotonic() + 60
    while (found := condition()) is None or found is False:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def runs(number):
    """Whether there is a process of this number that has not ended."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("name", "word", "code", "said"),
    [
        ("exits", "0", 0, ""),
        ("exits", "3", 3, ""),
        ("exits", "a sentence", 1, "a sentence"),
        ("fails", "why it fails", 1, "RuntimeError: why it fails"),
        ("kills_itself", "SIGKILL", -9, ""),
        ("kills_itself", "SIGSEGV", -11, ""),
    ],
)
def test_how_jobs_end(starter, name, word, code, said):
    process = starter(job(name, word))
    assert wait_for(process.poll) == code
    assert process.poll() == code
    assert last_lines(Path("log.txt"), 1) == (said or "said by an import")


def test_each_job_has_its_log_its_words_and_a_group_of_its_own(starter, tmp_path):
    processes = [starter(job("says_where", str(number), log=f"{number}.txt")) for number in range(2)]
    assert [wait_for(process.poll) for process in processes] == [0, 0]
    for number in range(2):
        begin, *said = (tmp_path / f"{number}.txt").read_text().splitlines()
        assert begin.endswith(f"pfl {number}")
        here = [str([str(tmp_path), "3", False, [str(number)]]), "[True, '', True]"]
        assert said == ["said by an import", *here, "a thread's end", "at its exit"]


def test_a_module_of_the_users_is_imported_anew(starter, tmp_path):
    said = []
    for value in ("first", "second"):
        (tmp_path / "of_the_user.py").write_text(f"VALUE = {value!r}\n")
        assert wait_for(starter(job("imports", "of_the_user")).poll) == 0
        said.append(last_lines(Path("log.txt"), 1))
    assert said == ["first", "second"]


def test_numbers_that_nobody_has_seeded_differ(starter, monkeypatch):
    monkeypatch.setattr(warm, "PRELOADED", ("numpy",))
    processes = [starter(job("draws", log=f"{number}.txt")) for number in range(2)]
    assert [wait_for(process.poll) for process in processes] == [0, 0]
    assert last_lines(Path("0.txt"), 1) != last_lines(Path("1.txt"), 1)


@pytest.mark.parametrize(("end", "code", "saved"), [("stop", 143, True), ("kill", -9, False)])
def test_a_job_is_asked_to_end_or_killed(starter, end, code, saved):
    process = starter(job("waits", "file"))
    wait_for(lambda: last_lines(Path("log.txt"), 1).isdigit())
    assert process.poll() is None
    getattr(process, end)()
    assert wait_for(process.poll) == code
    assert Path("file").exists() is saved
    process.kill()  # of one that has ended: nothing


def test_a_job_that_is_killed_before_it_is_copied_does_not_run(starter):
    process = starter(job("waits", "file"))
    process.kill()
    assert wait_for(process.poll) in (-signal.SIGTERM, 143)


def test_a_template_that_is_killed_in_its_import_says_so_and_another_one_is_started(starter, monkeypatch):
    monkeypatch.setattr(warm, "PRELOADED", ("_helpers.killed_in_import",))
    processes = [starter(job("exits", "0", log=f"{number}.txt")) for number in range(2)]
    assert [wait_for(process.poll) for process in processes] == [-9, -9]
    how = "the process that starts runs ended by SIGKILL, perhaps out of memory"
    assert last_lines(Path("1.txt"), 1) == f"pfl: this could not be started: {how}"
    assert "importing\n" in Path("1.txt").read_text()
    monkeypatch.setattr(warm, "PRELOADED", ())
    assert wait_for(starter(job("exits", "0")).poll) == 0


def test_jobs_outlast_their_template(starter):
    process = starter(job("waits", "file"))
    wait_for(lambda: last_lines(Path("log.txt"), 1).isdigit())
    starter._template.process.kill()
    starter._template.process.wait()
    other = starter(job("exits", "5", log="other.txt"))
    assert wait_for(other.poll) == 5
    assert process.poll() is None
    process.stop()
    assert wait_for(process.poll) == 143


KILLED = """
import os, signal, sys, time
from pathlib import Path
from pfl_lightning.jobs import warm
from pfl_lightning.jobs.supervision import Job

warm.PRELOADED = ()
starter = warm.WarmStarter(1)
process = starter(Job(("file",), Path("log.txt"), entry="_helpers.job_entries:waits"))
while process.poll() is None and len(Path("log.txt").read_text().splitlines()) < 2:
    time.sleep(0.01)
print(starter._template.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_remains_where_the_command_is_killed(starter, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    numbers = [int(killed.stdout), int(last_lines(tmp_path / "log.txt", 1))]
    wait_for(lambda: not any(runs(number) for number in numbers))
    assert (tmp_path / "file").read_text() == "saved"


def test_where_processes_cannot_be_copied_each_job_starts_afresh(monkeypatch):
    assert isinstance(local_starter(1), WarmStarter)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert local_starter(3).func is LocalProcess
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "fork")
    assert local_starter(3).keywords == {"threads": 3}


NO_GPU = """
import sys, threading, weakref, torch

def touched(*args, **options):
    raise AssertionError("an import asks for GPUs")

for name in ("is_available", "device_count", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
torch.accelerator.is_available = torch.accelerator.current_accelerator = touched
from pfl_lightning.cli.federated_cli import PREPARED
from pfl_lightning.jobs.warm import preload
names, sys.argv[1:] = sys.argv[1:], []
preload(names)
print(threading.active_count(), [*PREPARED], weakref.finalize(sys, print).atexit)
"""


def test_what_the_template_does_touches_no_gpu_and_starts_no_thread():
    done = subprocess.run([sys.executable, "-c", NO_GPU, *warm.PRELOADED], capture_output=True, text=True)
    assert done.stdout == "1 ['fit'] True\n\n", done.stderr  # what a copy is to do at its own end, it does
    assert done.stderr == ""
