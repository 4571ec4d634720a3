"""Watch over Ray's own processes, with sockets in their place."""

import socket
import warnings

import pytest
from _helpers.fake_cluster import FakeCluster, fake_ray_engine
from _helpers.ray_helpers import FakeRay
from _helpers.toy import run

from pfl_lightning.engines.workers import ray as ray_engine
from pfl_lightning.engines.workers.ray_cluster import Services
from pfl_lightning.errors import FederationError
from pfl_lightning.methods import FedAvg


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_what_answers_is_there_and_what_refuses_has_died(listener):
    services = Services({"raylet": listener.getsockname()}, own=True)
    services.check(now=True)
    listener.close()
    services.check()  # less than a second later
    with pytest.raises(FederationError, match=r"Ray's raylet at 127\.0\.0\.1:\d+ has died .*--ckpt_path last.*fewer w"):
        services.check(now=True)
    assert services.lost


def test_services_of_a_cluster_have_time_to_come_back(listener, monkeypatch):
    services = Services({"raylet": listener.getsockname()})
    listener.close()
    services.check(now=True)
    assert not services.lost
    monkeypatch.setattr("pfl_lightning.engines.workers.ray_cluster.SILENCE", 0.0)
    with pytest.raises(FederationError, match="has died"):
        services.check(now=True)


@pytest.mark.parametrize(
    ("host", "own", "said"),
    [
        ("127.0.0.1", True, False),
        ("::1", True, False),
        ("localhost", True, False),
        ("192.0.2.7", True, True),
        ("192.0.2.7", False, False),  # of a cluster, which somebody else has started
    ],
)
def test_services_that_other_machines_reach_are_named_where_nobody_wanted_that(host, own, said):
    services = Services({"raylet": (host, 1), "gcs": ("127.0.0.1", 2)}, own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        services.warn_if_reachable()
    assert [f"reached from other machines, at {host}:" in str(one.message) for one in caught] == [True] * said


class DeadRay(FakeRay):
    """Ray that is no longer there: replies fail or do not come, and other calls would wait without an end."""

    def kill(self, actor):
        pytest.fail("a call of a dead Ray")


@pytest.mark.parametrize("how", ["no reply", "error", "error of a put"])
def test_a_run_ends_when_ray_has_died_and_calls_it_no_more(listener, monkeypatch, how):
    engine, _ = fake_ray_engine(monkeypatch)
    ray, services = DeadRay(), Services({"raylet": listener.getsockname()}, own=True)
    clusters = []

    def cluster(*args):
        clusters.append(FakeCluster(ray, 2))
        clusters[0].services = services
        return clusters[0]

    def wait(references, num_returns, timeout):
        assert timeout is not None  # it must not wait without looking
        if ray.calls < 3:
            return FakeRay.wait(ray, references, num_returns, timeout)
        listener.close()
        if how == "no reply":
            services._last = float("-inf")  # a second later
            return [], references
        return FakeRay.wait(ray, references, num_returns, timeout)

    def get(reference):
        if listener.fileno() < 0 and how == "error":
            raise ray.exceptions.RayError("the worker died")
        return reference.compute()

    def put(value):
        if listener.fileno() < 0:
            raise BrokenPipeError("no raylet")
        return FakeRay.put(ray, value)

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray_engine, "Cluster", cluster)
    with pytest.raises(FederationError, match=r"Ray's raylet at .* has died"):
        run(FedAvg, 2, engine=engine)
    assert ray.actors == 2
    assert [cluster.closed for cluster in clusters] == [1]
