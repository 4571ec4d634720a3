"""RayEngine with real worker processes.

Most tests here take over 10 s: every worker is a real process that imports torch, and some are killed. Most are marked
``slow``; other tests use an emulated Ray (``test_payloads.py``).
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import lightning as L
import pytest
from _helpers.configs import digits_config
from _helpers.ray_helpers import DiesOnce
from _helpers.toy import assert_same, linear_encoder, run, tiny_encoder, whole_state

from pfl_lightning import RayEngine, SequentialEngine
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import FedProto

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

FIT = partial(FedProto, lr=0.05, epochs=1, fine_tune="all")
LONG = partial(FedProto, lr=0.01, epochs=30)
ENCODERS = [tiny_encoder, linear_encoder]
HELPERS = Path(__file__).parents[2]


@pytest.fixture
def descendants(monkeypatch):
    """Other processes that have inherited this test's environment; found where there is a /proc."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PFL_TEST_MARK", mark)

    def find():
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"PFL_TEST_MARK={mark}".encode() in entry.read_bytes():
                    found.append(entry.parent)
        return found  # this process itself shows the environment that it was started with

    return find


@pytest.fixture
def left_behind(descendants):
    """Number of those processes."""
    return lambda: len(descendants())


@pytest.mark.slow
def test_two_processes_one_of_which_dies_give_what_fabric_fit_gives(tmp_path, caplog, left_behind):
    engine = RayEngine(workers=2, start_timeout=400.0, engine=DiesOnce(tmp_path, client=2))
    got = run(FIT, 3, encoder=ENCODERS, engine=engine)
    assert (tmp_path / "died-0").exists()
    assert sum("a worker died on client" in line for line in caplog.messages) == 1
    expected = run(FIT, 3, encoder=ENCODERS, engine=SequentialEngine())
    assert_same(whole_state(got), whole_state(expected))
    assert got.test_scores == expected.test_scores
    assert not ray.is_initialized()
    _wait_until(lambda: left_behind() == 0, 30)


class RayDies(L.Callback):
    """Kills one of Ray's own processes in the middle of a round."""

    def __init__(self, name, descendants):
        self.name, self.descendants, self.killed = name, descendants, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 1):
            for process in self.descendants():
                if (process / "comm").read_text().strip() == self.name:
                    os.kill(int(process.name), signal.SIGKILL)
                    self.killed += 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_the_death_of_ray_itself_is_an_error_and_leaves_no_process_behind(name, descendants):
    dies = RayDies(name, descendants)
    with pytest.raises(FederationError, match=rf"Ray's .*{name}.* has died .*Resume with --ckpt_path last"):
        run(LONG, 40, engine=RayEngine(workers=2, start_timeout=400.0), callbacks=[dies])
    assert dies.killed == 1
    assert not ray.is_initialized()
    _wait_until(lambda: not descendants(), 60)


@pytest.mark.slow
def test_a_connection_of_the_users_stays(tmp_path):
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        with pytest.warns(UserWarning, match=r"connected to Ray already; address='auto' is not used"):
            got = run(FIT, 1, encoder=ENCODERS, engine=RayEngine(workers=1, start_timeout=400.0, address="auto"))
        assert ray.is_initialized()
        assert_same(whole_state(got), whole_state(run(FIT, 1, encoder=ENCODERS)))
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pfl_lightning'] = None")
        missing = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
        with pytest.raises(ConfigurationError, match=r"a worker cannot import what it needs; install pfl-lightning"):
            run(FIT, 1, encoder=ENCODERS, engine=RayEngine(workers=1, runtime_env=missing))
        with (
            pytest.warns(UserWarning, match="3 workers of 2 cores each were asked for, there are 2 cores"),
            pytest.raises(ConfigurationError, match=r"gpus_per_worker is 1.5, Ray finds 0 GPUs"),
        ):
            run(FIT, 1, engine=RayEngine(workers=3, cpus_per_worker=2, gpus_per_worker=1.5))
    finally:
        ray.shutdown()


class NodeGoes(L.Callback):
    """Takes a node away in the middle of a round."""

    def __init__(self, cluster, node):
        self.remove = threading.Thread(target=lambda: cluster.remove_node(node))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 1):
            self.remove.start()


@pytest.mark.slow
def test_a_cluster_by_address_that_loses_a_node(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    goes = NodeGoes(cluster, cluster.add_node(num_cpus=1))
    try:
        engine = RayEngine(workers=2, start_timeout=400.0, address=cluster.address)
        got = run(LONG, 3, engine=engine, callbacks=[goes])
        goes.remove.join()
    finally:
        cluster.shutdown()
    assert_same(whole_state(got), whole_state(run(LONG, 3)))


def test_an_address_that_nobody_answers():
    with pytest.raises(ConfigurationError, match=r"no Ray cluster can be reached at address='127.0.0.1:9'.*ray start"):
        run(FIT, 1, engine=RayEngine(address="127.0.0.1:9"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ctrl_c_leaves_no_process_behind(tmp_path, left_behind):
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
from _helpers.ray_helpers import Sleeps
from _helpers.toy import run
from pfl_lightning import RayEngine
from pfl_lightning.methods import FedAvg
run(FedAvg, 1, engine=RayEngine(workers=2, start_timeout=400.0, engine=Sleeps({str(tmp_path)!r})))
"""
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _wait_until(lambda: (tmp_path / "sleeping").exists() or process.poll() is not None, 120)
        assert process.poll() is None
        assert left_behind() > 3 or not Path("/proc").exists()
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said
    _wait_until(lambda: left_behind() == 0, 30)


@pytest.mark.slow  # two starts of Ray
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_sigterm_to_all_processes_ends_the_command_in_order_and_it_goes_on(tmp_path, left_behind):
    """Schedulers send it to Ray's own processes, too, which end before this one."""
    options = {"trainer.max_epochs": 200, "model.engine": {"class_path": "RayEngine", "init_args": {"workers": 1}}}
    pfl = [sys.executable, "-m", "pfl_lightning.cli.main"]
    process = subprocess.Popen(
        [*pfl, "fit", "--config", digits_config(tmp_path, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = tmp_path / "runs" / "version_0"
    try:
        _wait_until(lambda: (run / "checkpoints" / "last.ckpt").exists() or process.poll() is not None, 120)
        os.killpg(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "pfl: stopped by SIGTERM. Resume after the last finished round with:\npfl fit" in said
    assert "Traceback" not in said
    _wait_until(lambda: left_behind() == 0, 30)
    before = json.loads((run / "results.json").read_text())
    words = shlex.split(said.splitlines()[-1])[1:]
    subprocess.run([*pfl, *words, "--trainer.max_epochs", str(before["rounds"] + 1)], check=True, capture_output=True)
    after = json.loads((run / "results.json").read_text())
    assert (before["finished"], after["finished"]) == (False, True)
    assert after["rounds"] == before["rounds"] + 1


def _wait_until(condition, seconds):
    for _ in range(10 * seconds):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")
