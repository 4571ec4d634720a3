"""Refusals of RayEngine: data and modules that cannot be sent, other versions, arguments without a meaning."""

from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.ray_helpers import Locked, NotHere
from _helpers.toy import Toy, run, tiny_encoder

from pfl_lightning import RayEngine
from pfl_lightning.engines.workers import worker
from pfl_lightning.engines.workers.packing import pack, unpack
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import FedPAC

FIT = partial(FedPAC, lr=0.05, epochs=1)


class Unpicklable(Toy):
    def setup(self, stage=None):
        super().setup(stage)
        self.connection = Locked()


def test_data_that_cannot_be_sent_are_named(monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch)
    with pytest.raises(
        ConfigurationError, match=r"the data \(Unpicklable\) cannot be sent.*'lock'.*__getstate__.*SequentialEngine"
    ):
        run(FIT, 1, engine=engine, data=Unpicklable())


def test_a_module_that_cannot_be_sent_is_named(monkeypatch):
    def encoder(shape):
        net = tiny_encoder(shape)
        net.lock = Locked()
        return net

    engine, _ = fake_ray_engine(monkeypatch)
    with pytest.raises(ConfigurationError, match="the clients' module or the engine cannot be sent"):
        run(FIT, 1, engine=engine, encoder=encoder)


def test_a_worker_without_a_module_that_it_needs(monkeypatch):
    def encoder(shape):
        net = tiny_encoder(shape)
        net.extra = NotHere()
        return net

    engine, _ = fake_ray_engine(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"cannot import what it needs; install pfl-lightning.*a_module"):
        run(FIT, 1, engine=engine, encoder=encoder)


def test_workers_of_another_version_are_refused(monkeypatch):
    monkeypatch.setattr(worker, "versions", lambda: {"torch": "1.0"})
    engine, _ = fake_ray_engine(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"a worker has other versions.*Install the same on all nodes"):
        run(FIT, 1, engine=engine)


def test_the_trainer_and_read_data_sets_stay_here():
    data = Toy()
    run(FIT, 1, data=data)
    assert data.trainer is not None
    found = unpack(pack(data))
    assert found.trainer is None
    assert found.cohort is None
    assert torch.equal(found.client_data(3).train.indices, data.client_data(3).train.indices)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be at least 1, got 0"),
        ({"gpus_per_worker": -0.5}, "gpus_per_worker must be a finite number of at least 0, got -0.5"),
        ({"engine": "RayEngine"}, "engine inside a worker and cannot be a RayEngine itself"),
    ],
)
def test_arguments_are_checked(options, error):
    options = {key: RayEngine() if value == "RayEngine" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=error):
        RayEngine(**options)


def test_workers_that_were_not_started():
    federation = run(FIT, 1)
    with pytest.raises(FederationError, match="workers have not been started"):
        next(RayEngine().run(iter(()), federation.environment))


def test_without_ray(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"needs Ray, which is not .* pip install 'pfl-lightning\[ray\]'"):
        RayEngine()


def test_an_engine_is_pickled_without_its_workers(monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch, 2)
    federation = run(FIT, 1, engine=engine)
    engine.start(federation.clients.models, federation.trainer.datamodule, federation.environment)
    assert engine._pool is not None
    assert unpack(pack(engine))._pool is None
    engine.stop()
    engine.stop()  # twice does no harm
