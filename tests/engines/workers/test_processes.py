"""ProcessEngine: real processes; most tests fork them, which takes no time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
from _helpers.process_helpers import Fork, ends, forked_process_engine
from _helpers.ray_helpers import DiesOnce, Raises
from _helpers.toy import Toy, assert_same, linear_encoder, run, tiny_encoder, whole_state

from pfl_lightning import ProcessEngine, SequentialEngine, VectorizedEngine
from pfl_lightning.engines import FitEnvironment
from pfl_lightning.engines.workers import packing
from pfl_lightning.engines.workers import processes as host
from pfl_lightning.engines.workers.processes import WorkerProcess
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import FedAvg, FedProto

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Linux or macOS")

FIT = partial(FedProto, lr=0.05, epochs=1, fine_tune="all")
ENCODERS = [tiny_encoder, linear_encoder]
HELPERS = Path(__file__).parents[2]


def processes_with(mark):
    """Other processes that have inherited an environment with this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in entry.read_bytes():
                found.append(entry.parent)
    return found


def test_processes_that_are_started_give_what_one_process_gives(tmp_path, caplog):
    """The only quick test here whose processes import everything themselves."""
    got = run(FIT, 2, encoder=ENCODERS, engine=ProcessEngine(workers=1, start_timeout=400.0))
    expected = run(FIT, 2, encoder=ENCODERS, engine=SequentialEngine())
    assert_same(whole_state(got), whole_state(expected))
    assert got.test_scores == expected.test_scores


@pytest.mark.parametrize("workers", [1, 3])
def test_a_dead_worker_costs_time_alone(workers, tmp_path, monkeypatch, caplog):
    engine = forked_process_engine(monkeypatch, workers, engine=DiesOnce(tmp_path, client=2))
    got = run(FIT, 3, encoder=ENCODERS, engine=engine)
    assert (tmp_path / "died-0").exists()
    assert sum("ProcessEngine: a worker died on client 2, round 2" in line for line in caplog.messages) == 1
    assert sum("was ended by SIGKILL" in line for line in caplog.messages) == 1
    assert_same(whole_state(got), whole_state(run(FIT, 3, encoder=ENCODERS)))


@pytest.mark.slow
def test_a_client_on_which_every_worker_dies_ends_the_run(tmp_path, monkeypatch):
    engine = forked_process_engine(monkeypatch, 2, engine=DiesOnce(tmp_path, client=2, times=3))
    with pytest.raises(FederationError, match=r"client 2, round 2: 3 workers in turn have died on it.*SIGKILL"):
        run(FIT, 3, encoder=ENCODERS, engine=engine)
    assert engine._pool is None


def test_no_process_is_left(monkeypatch):
    mark = uuid.uuid4().hex
    processes = []
    stop = ProcessEngine.stop

    def look(self):
        processes.extend([] if self._pool is None else [slot.worker._process for slot in self._pool._slots])
        stop(self)

    monkeypatch.setenv("PFL_TEST_MARK", mark)
    monkeypatch.setattr(ProcessEngine, "stop", look)
    run(FIT, 1, engine=forked_process_engine(monkeypatch, 3))
    assert len(processes) == 3
    assert all(process.poll() == -signal.SIGKILL for process in processes)


def test_an_error_in_a_worker_is_raised_here(monkeypatch):
    with pytest.raises(RuntimeError, match="Unlucky: wind and rain") as caught:
        run(FIT, 1, engine=forked_process_engine(monkeypatch, 2, engine=Raises()))
    assert "in the local fit of client 2, round 1" in caught.value.__notes__


def test_a_client_that_diverges_is_left_out(monkeypatch):
    def garbage(inputs, targets):
        inputs[20] = torch.inf

    def go(engine):
        with pytest.warns(UserWarning, match="left out of the aggregation: client 1, round 1"):
            return run(FIT, 1, engine=engine, data=Toy(change=garbage), limit_val_batches=0)

    assert_same(whole_state(go(forked_process_engine(monkeypatch, 2))), whole_state(go(SequentialEngine())))


def test_large_messages_do_not_wait_for_one_another(monkeypatch):
    """Messages are larger than the system keeps for a reader that computes."""

    def encoder(shape):
        net = torch.nn.Sequential(torch.nn.Linear(shape[0], 40_000), torch.nn.Linear(40_000, 4))
        net.out_features = 4
        return net

    fit = partial(FedAvg, epochs=1, eval_model="trained")
    got = run(fit, 2, engine=forked_process_engine(monkeypatch, 2), encoder=encoder)
    assert_same(whole_state(got), whole_state(run(fit, 2, encoder=encoder)))


# ---------------------------------------------------------------------- who ends


def test_a_worker_ends_with_the_process_that_started_it(monkeypatch):
    worker = WorkerProcess(1, [])
    worker.connection.close()  # as it is when a process is killed
    assert ends(worker._process, 120)


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_worker_that_still_imports_ends_with_a_main_process_that_is_killed(tmp_path, monkeypatch):
    package = tmp_path / "pfl_lightning"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'imports')!r}).touch()\ntime.sleep(120)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PFL_TEST_MARK", mark)
    main = os.fork()
    if main == 0:  # a main process of its own, which need not import anything
        workers = [WorkerProcess(1, []) for _ in range(2)]
        time.sleep(120)
        os._exit(len(workers))
    try:
        _wait_until((tmp_path / "imports").exists, 60)
        assert processes_with(mark)
    finally:
        os.kill(main, signal.SIGKILL)
        os.waitpid(main, 0)
    _wait_until(lambda: not processes_with(mark), 10)


def test_a_worker_that_cannot_read_a_message_ends_and_says_why(monkeypatch, capfd):
    monkeypatch.setattr(host, "launch", Fork)
    worker = WorkerProcess(1, [])
    worker.connection.send_bytes(b"no message")
    assert ends(worker._process, 120)
    worker.connection.close()
    assert "UnpicklingError" in capfd.readouterr().err


def test_what_a_worker_prints_does_not_wait_in_a_buffer(monkeypatch):
    words = []
    monkeypatch.setattr(host.subprocess, "Popen", lambda command, **options: words.extend(command))
    host.launch(0)
    assert words[:2] == [sys.executable, "-u"]


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
from _helpers.ray_helpers import Sleeps
from _helpers.toy import run
from pfl_lightning import ProcessEngine
from pfl_lightning.methods import FedAvg
run(FedAvg, 100_000, engine=ProcessEngine(workers=2, start_timeout=400.0, engine=Sleeps({folder!r}, {seconds})))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_no_process_behind(name, tmp_path):
    """SIGTERM comes from a scheduler, which sends it to the workers, too; Lightning ends the fit after the batch."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    program = PROGRAM.format(folder=str(tmp_path), seconds=0.05 if name == "SIGTERM" else 600)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PFL_TEST_MARK": mark},
        start_new_session=True,
    )
    try:
        _wait_until(lambda: (tmp_path / "sleeping").exists() or process.poll() is not None, 120)
        assert process.poll() is None
        assert len(processes_with(mark)) == 3
        for entry in processes_with(mark) if name == "SIGTERM" else ():
            os.kill(int(entry.name), signal.SIGTERM)
        os.killpg(process.pid, getattr(signal, name))
        process.wait(60)
    finally:
        process.kill()
    _wait_until(lambda: not processes_with(mark), 30)


SCRIPT = """
import torch
from functools import partial
from _helpers.toy import run, tiny_encoder
from pfl_lightning import ProcessEngine
from pfl_lightning.methods import FedAvg
print("this script runs")


class Own(FedAvg):
    def loss_terms(self, features, labels):
        return {"cross_entropy": 2 * super().loss_terms(features, labels)["cross_entropy"]}


run(partial(Own, epochs=1), 1, engine=ProcessEngine(workers=1), encoder=lambda shape: tiny_encoder(shape))
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_classes_of_a_script_without_a_guard(installed, tmp_path):
    if installed:
        pytest.importorskip("cloudpickle")
    file = tmp_path / "script.py"
    file.write_text(SCRIPT if installed else "import sys; sys.modules['cloudpickle'] = None\n" + SCRIPT)
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(file)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.count("this script runs") == 1
    assert ("done" in done.stdout) == installed, done.stderr
    assert installed or "only with the package cloudpickle: pip install cloudpickle" in done.stderr


# ---------------------------------------------------------------------- what is refused


class InScript:
    """Unpickled as a class of a script is where there is no such script."""

    def __reduce__(self):
        return _missing, ()


def _missing():
    raise AttributeError("Can't get attribute 'Net' on <module '__main__' (built-in)>")


def test_what_a_worker_cannot_find_in_the_script_is_named(monkeypatch):
    def encoder(shape):
        net = tiny_encoder(shape)
        net.extra = InScript()
        return net

    with pytest.raises(ConfigurationError, match=r"pip install cloudpickle, or move it into a module.*'Net'"):
        run(FIT, 1, engine=forked_process_engine(monkeypatch, 1), encoder=encoder)


def test_a_lambda_without_cloudpickle_is_refused(monkeypatch):
    import pickle

    def encoder(shape):
        net = tiny_encoder(shape)
        net.extra = lambda: None
        return net

    monkeypatch.setattr(packing, "_base_pickler", lambda: pickle.Pickler)
    with pytest.raises(ConfigurationError, match="the clients' module or the engine cannot be sent to worker process"):
        run(FIT, 1, engine=forked_process_engine(monkeypatch, 1), encoder=encoder)


def test_tensors_travel_without_cloudpickle(monkeypatch):
    import pickle

    monkeypatch.setattr(packing, "_base_pickler", lambda: pickle.Pickler)
    value = {"a": torch.randn(5, 3).t()}
    found = packing.unpack(packing.pack(value))
    assert torch.equal(found["a"], value["a"])
    assert found["a"].stride() == value["a"].stride()


def test_a_gpu_is_refused():
    environment = FitEnvironment(device=torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match=r"on the CPU, and the Trainer is on cuda:0: use .*with gpus_per"):
        ProcessEngine().connect(Toy(), environment, 1)


def test_an_engine_of_processes_inside_another_is_refused():
    with pytest.raises(ConfigurationError, match="inside a worker and cannot be a ProcessEngine itself"):
        ProcessEngine(engine=ProcessEngine())


@pytest.mark.parametrize(("cores", "threads", "expected"), [(2, 1, 2), (2, 4, 1), (64, 1, 5), (8, 2, 4), (1, 1, 1)])
def test_the_number_of_workers(cores, threads, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert ProcessEngine().connect(Toy(), FitEnvironment(), threads).num_workers == expected
    assert ProcessEngine(workers=3).connect(Toy(), FitEnvironment(), threads).num_workers == 3


def test_a_vectorized_engine_inside(monkeypatch):
    inside = VectorizedEngine(2, forward="vmap")
    got = run(FIT, 2, engine=forked_process_engine(monkeypatch, 2, engine=inside))
    assert_same(whole_state(got), whole_state(run(FIT, 2, engine=VectorizedEngine(2, forward="vmap"))))


def _wait_until(condition, seconds):
    for _ in range(10 * seconds):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")
