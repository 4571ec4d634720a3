"""A module that brings a stream which it fills itself, as an agent does: each client has its own."""

import random
from typing import Any

import pytest
import torch
from _helpers.project import Net
from _helpers.toy import INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine, federate
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg
from pfl_lightning.server import AveragingAggregator


class Replay(IterableDataset):
    def __init__(self, buffer: list[Any]) -> None:
        self.buffer = buffer

    def __iter__(self) -> Any:
        for seen in random.sample(self.buffer, 12):
            yield torch.tensor(seen), int(seen[0] * 5)


class Agent(Net):
    """Plays in every step, and learns of what it has played. It validates nothing."""

    sizes: list[int]
    validation_step = test_step = Net.__mro__[1].validation_step

    def __init__(self) -> None:
        super().__init__()
        own = random.Random(3)
        self.buffer = [[own.random() for _ in range(INPUTS)] for _ in range(20)]

    def train_dataloader(self) -> Any:
        return DataLoader(Replay(self.buffer), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(self.buffer))
        self.buffer.append([random.random() for _ in range(INPUTS)])
        return super().training_step(batch, batch_idx)


def fitted(rounds: int, path: Any = None, **options: Any) -> Any:
    Agent.sizes = []
    trainer = quiet_trainer(
        rounds, FederatedLoop(method=FedAvg, num_clients=2, seed=1, **options), val_check_interval=5
    )
    trainer.fit(module := Agent(), ckpt_path=path)
    return dict(module.state_dict()), trainer


def test_each_client_has_the_stream_of_its_own_copy(tmp_path):
    given = random.getstate()
    whole, _ = fitted(2)
    assert Agent.sizes == [*range(20, 23)] * 2 + [*range(23, 26)] * 2  # of two clients, each with a buffer of its own
    assert random.getstate() == given
    _, trainer = fitted(1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    random.seed(7)
    resumed, trainer = fitted(2, tmp_path / "one.ckpt")
    assert_same(resumed, whole, atol=0.0)
    assert trainer.val_check_interval == 5


def test_it_is_read_by_an_inner_trainer():
    with pytest.raises(ConfigurationError, match=r"an IterableDataset; each client has its own.*use TrainerE"):
        fitted(1, engine=SequentialEngine())


def test_a_stream_that_needs_a_set_up_is_given_by_the_client():
    class Prepared(Agent):
        def setup(self, stage: str) -> None:
            self.ready = True

    federation, data = federate(Prepared(), method=FedAvg, num_clients=2)
    with pytest.raises(
        TypeError, match=r"use a map-style Dataset .*, or a list of data sets, one for each client.*__init__"
    ):
        quiet_trainer(1).fit(federation, datamodule=data)


class Uneven(IterableDataset):
    """Another number of items in each pass."""

    read: list[int]

    def __iter__(self) -> Any:
        self.read.append(4 + len(self.read) % 3)
        for place in range(self.read[-1]):
            yield torch.full((INPUTS,), float(place)), place % 5


BATCHES = [(torch.ones(size, INPUTS), torch.zeros(size, dtype=torch.int64)) for size in (3, 4, 2)]


def test_an_update_counts_the_items_of_the_last_pass(monkeypatch, recwarn):
    """The round compares it with what the engine has counted after the fit: no update of such clients is refused."""
    receive, counts = AveragingAggregator.receive, []

    def noting(server: Any, update: Any) -> None:
        counts.append((update.num_samples, Uneven.read[-1]))
        receive(server, update)

    monkeypatch.setattr(AveragingAggregator, "receive", noting)
    Uneven.read = []
    silos = [DataLoader(Uneven(), 3), DataLoader(BATCHES, batch_size=None)]
    federation, data = federate(Net(), silos, FedAvg, epochs=2, engine=TrainerEngine())
    quiet_trainer(2, limit_val_batches=0).fit(federation, datamodule=data)
    assert len(set(Uneven.read[-4:])) == 3
    assert all(told == read for told, read in counts[::2])
    assert not [str(one.message) for one in recwarn if "left out" in str(one.message)]
