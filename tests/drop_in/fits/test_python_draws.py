"""Draws from Python's and NumPy's generators in a local fit: by transforms, samplers and the module's own step."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, Dataset

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine, federate
from pfl_lightning.methods import FedAvg

DRAWS = {"numpy": lambda: np.random.random(), "random": random.random}  # noqa: NPY002


class Noisy(Dataset):
    """Items under a transform that draws, and their classes."""

    def __init__(self, library):
        self.inputs, self.library = torch.randn(12, INPUTS, generator=torch.Generator().manual_seed(1)), library

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, place):
        return self.inputs[place] + DRAWS[self.library](), place % CLASSES


class Data(L.LightningDataModule):
    def __init__(self, library):
        super().__init__()
        self.library = library

    def train_dataloader(self):
        return DataLoader(Noisy(self.library), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Noisy(self.library), batch_size=4)


class Drawing(Net):
    """Weights each step by a draw of its own."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * DRAWS["random"]()


def fitted(library, engine, rounds=2, ckpt_path=None, save=None, seed=1):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    federation, data = federate(Drawing(), Data(library), FedAvg, num_clients=2, seed=1, engine=engine())
    trainer = quiet_trainer(rounds, limit_val_batches=0)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    if save is not None:
        trainer.save_checkpoint(save)
    return dict(federation.global_model().state_dict())


@pytest.mark.parametrize("library", DRAWS)
def test_they_are_seeded_for_round_and_client(library, tmp_path):
    whole = fitted(library, TrainerEngine)
    assert_same(fitted(library, SequentialEngine, seed=2), whole)
    fitted(library, TrainerEngine, rounds=1, save=tmp_path / "one.ckpt", seed=3)
    assert_same(fitted(library, TrainerEngine, ckpt_path=str(tmp_path / "one.ckpt"), seed=4), whole)


@pytest.mark.parametrize("library", DRAWS)
def test_they_are_the_same_in_worker_processes_and_vectorized(library, monkeypatch):
    whole = fitted(library, TrainerEngine)
    assert_same(fitted(library, VectorizedEngine, seed=2), whole)
    ray = fake_ray_engine(monkeypatch, engine=TrainerEngine())[0]
    assert_same(fitted(library, lambda: ray, seed=3), whole)
