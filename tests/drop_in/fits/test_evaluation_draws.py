"""Draws in a validation or test step, from torch's, Python's and NumPy's generators."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.project import Data, Net
from _helpers.toy import SEED, quiet_trainer
from torch.utils.data import DataLoader

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine, federate
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FedAvg

DRAWS = {"torch": lambda: float(torch.rand(())), "python": random.random, "numpy": lambda: float(np.random.rand())}  # noqa: NPY002


class Drawing(Net):
    """Logs what it draws while it is evaluated, from all three generators."""

    def validation_step(self, batch, batch_idx):
        for name, draw in DRAWS.items():
            self.log(f"val_{name}", draw())

    def test_step(self, batch, batch_idx):
        for name, draw in DRAWS.items():
            self.log(f"test_{name}", draw())


class WithValidation(Data):
    def val_dataloader(self):
        return DataLoader(self.test_dataloader().dataset, batch_size=7)


ENGINES = {
    "trainer": lambda _: TrainerEngine(),
    "vectorized": lambda _: VectorizedEngine(forward="vmap"),
    "ray": lambda monkeypatch: fake_ray_engine(monkeypatch, engine=TrainerEngine())[0],
}


class Drawn(L.Callback):
    """What every client logged in every evaluation."""

    def __init__(self):
        self.values = []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.values.append({client: score.logged for client, score in pl_module.validation_scores.items()})

    def on_test_epoch_end(self, trainer, pl_module):
        self.values.append({client: score.logged for client, score in pl_module.test_scores.items()})


def drawn(engine, rounds=2, seed=0, path=None, save=None):
    """What every client logged in the evaluations after the rounds, from the first that is trained, and in a test."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    federation, data = federate(Drawing(), WithValidation(), FedAvg, num_clients=2, seed=SEED, engine=engine)
    record = Drawn()
    trainer = quiet_trainer(rounds, FederatedLoop(), record)
    trainer.fit(federation, datamodule=data, ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    trainer.test(federation, datamodule=data, verbose=False)
    return record.values


def test_they_differ_between_rounds_clients_and_parts():
    values = drawn(SequentialEngine())
    for name in DRAWS:
        known = (f"{part}_{name}" for part in ("val", "test"))
        found = [own[each] for each in known for scores in values for own in scores.values() if each in own]
        assert len(found) == len(set(found)) == 6


@pytest.mark.parametrize("make_engine", ENGINES.values(), ids=ENGINES)
def test_they_are_the_same_under_every_engine(make_engine, monkeypatch):
    for one, other in zip(drawn(make_engine(monkeypatch), seed=1), drawn(SequentialEngine(), seed=2), strict=True):
        assert one.keys() == other.keys() == {0, 1}
        for client, own in one.items():
            assert own == pytest.approx(other[client], abs=1e-6)  # means of single and of double precision


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_a_resumed_run_draws_the_same(engine, tmp_path):
    whole = drawn(engine(), seed=1)
    drawn(engine(), rounds=1, save=tmp_path / "one.ckpt", seed=2)
    assert drawn(engine(), path=str(tmp_path / "one.ckpt"), seed=3)[-2:] == whole[-2:]
