"""``set_epoch`` of samplers: the epochs of a client over its rounds, as in a plain run."""

from typing import Any

import pytest
import torch
from _helpers.project import SEED, Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pfl_lightning import federate
from pfl_lightning.methods import FedAvg

ITEMS = TensorDataset(torch.rand(12, INPUTS, generator=torch.Generator().manual_seed(0)), torch.arange(12) % CLASSES)


class Seen(Net):
    """Notes the items of each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        places = [int((ITEMS.tensors[0] == one).all(1).nonzero()) for one in batch[0]]
        BATCHES.append(places)
        return super().training_step(batch, batch_idx)


BATCHES: list[list[int]] = []


def epochs(rounds: int, divided: bool, **options: Any) -> list[list[int]]:
    """The order of the items in each local epoch of a single client."""
    BATCHES.clear()
    loader = DataLoader(ITEMS, 4, sampler=DistributedSampler(ITEMS, num_replicas=1, rank=0))
    module = Seen()
    if not options:
        quiet_trainer(rounds, use_distributed_sampler=False).fit(module, loader)
    else:
        given: dict[str, Any] = {"train_dataloaders": [loader]}
        if divided:
            given = {"train_dataloaders": loader, "val_dataloaders": DataLoader(ITEMS), "num_clients": 1}
        federation, data = federate(module, method=FedAvg, seed=SEED, head="fc", **given, **options)
        quiet_trainer(rounds, limit_val_batches=0).fit(federation, datamodule=data)
    return [[place for own in BATCHES[start : start + 3] for place in own] for start in range(0, len(BATCHES), 3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("schedule", ["continue", "restart"])
def test_epochs_of_one_client_are_those_of_a_plain_run(divided, schedule):
    plain = epochs(6, divided)
    assert len(plain) == 6
    assert plain[0] != plain[1]
    assert epochs(3, divided, schedule=schedule, epochs=2) == plain
