"""Division of a machine's GPUs and cores among Ray workers."""

import ipaddress
import os
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from pfl_lightning.engines.workers import ray as cluster
from pfl_lightning.engines.workers.ray import gpu_share

SHARES = [(1, 1, 1), (1, 4, 0.25), (2, 3, 0.5), (2, 5, 1 / 3), (3, 2, 1), (8, 4, 2), (0, 2, 0)]


@pytest.mark.parametrize(("gpus", "workers", "share"), SHARES)
def test_all_workers_find_a_gpu(gpus, workers, share):
    assert gpu_share(gpus, workers) == pytest.approx(share)
    places = gpus // share if share >= 1 else gpus * int(1 / share + 1e-9) if share else workers
    assert places >= workers


class RunningRay(SimpleNamespace):
    """A Ray that this process is connected to already, with some GPUs."""

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"NodeManagerAddress": getattr(self, "host", "127.0.0.1")}]

    def cluster_resources(self):
        return {"CPU": 8.0, "GPU": float(self.gpus)}


@pytest.mark.parametrize(("gpus", "workers", "share"), SHARES)
def test_workers_get_a_number_of_gpus_that_ray_takes(monkeypatch, gpus, workers, share):
    monkeypatch.setattr(cluster, "require_ray", lambda: RunningRay(gpus=gpus))
    found = cluster.Cluster(None, workers, 1, None, True).resources["num_gpus"]
    assert found == pytest.approx(share)
    assert found <= 1 or found == int(found)


@pytest.mark.parametrize(("gpus", "workers"), [(1, 1), (2, 2), (4, 4), (6, 4)])
def test_each_gpu_has_one_worker_and_at_most_four_have_some(monkeypatch, gpus, workers):
    """Of a machine of 8 cores; a share that is given, and a number, count as they are given."""
    monkeypatch.setattr(cluster, "require_ray", lambda: RunningRay(gpus=gpus))
    assert cluster.Cluster(None, None, 1, None, True).num_workers == workers
    assert cluster.Cluster(None, None, 1, 0.25, True).num_workers == 8
    assert cluster.Cluster(None, 7, 1, None, True).num_workers == 7
    assert cluster.Cluster(None, None, 1, None, False).num_workers == 8


class StartingRay(RunningRay):
    """A Ray that is started here, as a process that a signal would kill."""

    def is_initialized(self):
        return hasattr(self, "process")

    def init(self, **_):
        self.process = subprocess.Popen(["sleep", "60"])

    def shutdown(self):
        self.process.kill()
        self.process.wait()


class RayWithHandler(StartingRay):
    """One that ends this process on SIGTERM, as Ray does."""

    def init(self, **options):
        super().init(**options)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))


def test_sigterm_stays_the_trainers(monkeypatch):
    monkeypatch.setattr(cluster, "require_ray", lambda: RayWithHandler(gpus=0))
    before = signal.getsignal(signal.SIGTERM)
    try:
        cluster.Cluster(None, 1, 1, None, False).close()
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("host", "said"), [("127.0.0.1", 0), ("::1", 0), ("localhost", 0), ("192.0.2.7", 1)])
def test_a_ray_that_other_machines_reach_is_named(host, said, monkeypatch):
    monkeypatch.setattr(cluster, "require_ray", lambda: StartingRay(gpus=0, host=host))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cluster.Cluster(None, 1, 1, None, False).close()
    assert [f"reached from other machines, at {host}:" in str(one.message) for one in caught] == [True] * said


def test_signals_of_a_job_do_not_kill_ray(monkeypatch):
    """SLURM sends them to all processes of a job, not to the Trainer alone."""
    ray = StartingRay(gpus=0)
    monkeypatch.setattr(cluster, "require_ray", lambda: ray)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    started = cluster.Cluster(None, 1, 1, None, False)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        ray.process.send_signal(number)
    ray.process.terminate()
    assert ray.process.wait() == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    started.close()


def test_ray_is_told_once_that_it_is_for_this_machine_and_a_users_word_counts(monkeypatch):
    constants = SimpleNamespace(ENABLE_RAY_CLUSTER=True)
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", constants)
    monkeypatch.delenv(cluster.CLUSTERS, raising=False)
    with pytest.raises(KeyError), cluster.listening_here_alone():  # noqa: PT012
        assert os.environ[cluster.CLUSTERS] == "0"  # of the processes that Ray starts
        assert constants.ENABLE_RAY_CLUSTER is False
        raise KeyError
    assert cluster.CLUSTERS not in os.environ
    assert constants.ENABLE_RAY_CLUSTER is True
    monkeypatch.setenv(cluster.CLUSTERS, "1")
    with cluster.listening_here_alone():
        assert os.environ[cluster.CLUSTERS] == "1"
        assert constants.ENABLE_RAY_CLUSTER is True


def listening():
    """Addresses on which this process, and those that it has started, listen for connections of the network."""
    psutil = pytest.importorskip("psutil")
    this = psutil.Process()
    found = [one for process in (this, *this.children(recursive=True)) for one in process.net_connections("inet")]
    return {ipaddress.ip_address(one.laddr.ip.removeprefix("::ffff:")) for one in found if one.status == "LISTEN"}


@pytest.mark.slow  # Ray is started
def test_a_ray_of_one_machine_listens_there_alone(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv(cluster.CLUSTERS, raising=False)
    before = listening()
    cluster.Cluster(None, 1, 1, None, False)
    try:
        assert ray.get(ray.remote(lambda: 7).remote()) == 7  # a worker listens, too
        found = listening() - before
        assert found
        assert all(address.is_loopback for address in found), found
    finally:
        ray.shutdown()
