"""RayEngine without Ray: everything but the processes."""

from _helpers.ray_helpers import FakeRay
from pfl_lightning import RayEngine
from pfl_lightning.engines.workers import engine as worker_engine
from pfl_lightning.engines.workers import ray as ray_engine


class FakeCluster(ray_engine.Cluster):
    """One that starts nothing."""

    def __init__(self, ray, num_workers):
        self.ray, self.num_workers, self.device, self.closed = ray, num_workers, "cpu", 0
        self.resources = {"num_cpus": 1}

    def close(self):
        self.closed += 1


def fake_ray_engine(monkeypatch, workers=2, deaths=(), seed=0, **options):
    """A RayEngine whose workers live in this process, and the Ray that they have; it sends the smallest tensor once."""
    ray = FakeRay(deaths, seed)
    monkeypatch.setattr(worker_engine, "WORTH_SHARING", 0)
    monkeypatch.setattr(ray_engine, "Cluster", lambda *args: FakeCluster(ray, workers))
    return RayEngine(workers=workers, **options), ray
