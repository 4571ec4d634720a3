"""Items that a user's workers read."""

import os
import pickle
import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from pfl_lightning.datamodules import IID, FromLoaders, FromSilos


class Reading(Dataset):
    """Items that say who has read them, and with what draws."""

    opened = False

    def __len__(self):
        return 24

    def __getitem__(self, place):
        draws = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
        return {"place": place, "process": os.getpid(), "opened": self.opened, "draws": torch.tensor(draws)}


def opening(worker):
    get_worker_info().dataset.opened = True


class Project(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def train_dataloader(self):
        return DataLoader(Reading(), batch_size=3, shuffle=True, **self.options)

    def val_dataloader(self):
        return DataLoader(Reading(), batch_size=4, **self.options)


def ready(**options):
    data = FromLoaders(IID(3), datamodule=Project(**options))
    data.setup()
    return data


def batches(data, client, seed=1):
    part = data.client_data(client).train
    return list(part.loader(3, generator=torch.Generator().manual_seed(seed), shuffle=True))


@pytest.fixture
def data():
    made = ready(num_workers=2, worker_init_fn=opening)
    yield made
    made.teardown("fit")


def processes(found):
    return {process for batch in found for process in batch["process"].tolist()}


def running(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_read_the_same_batches_and_stay(data):
    here, seen = ready(), set()
    for client in (0, 2, 0):
        found, expected = batches(data, client), batches(here, client)
        assert [batch["place"].tolist() for batch in found] == [batch["place"].tolist() for batch in expected]
        assert all(batch["opened"].all() for batch in found)
        seen |= processes(found)
    assert len(seen) == 2
    assert os.getpid() not in seen
    data.teardown("fit")
    assert not any(map(running, seen))
    assert processes(batches(data, 1)).isdisjoint(seen)  # they are started again


def test_draws_do_not_depend_on_what_was_read_before(data):
    before = torch.random.get_rng_state()
    first = batches(data, 0)
    batches(data, 1, seed=5)
    again, other = batches(data, 0), batches(data, 0, seed=2)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one["draws"], two["draws"])
    assert not torch.equal(first[0]["draws"], other[0]["draws"])
    assert not torch.equal(first[0]["draws"], first[1]["draws"])
    assert torch.equal(torch.random.get_rng_state(), before)


class InOrder(Project):
    def train_dataloader(self):
        return DataLoader(Reading(), batch_size=3, **self.options)


def test_without_a_new_order_draws_differ_by_pass_and_fit():
    data = FromLoaders(IID(2), datamodule=InOrder(num_workers=1))
    data.setup()

    def two_passes(client, seed):
        generator = torch.Generator().manual_seed(seed)
        loader = data.client_data(client).train.loader(3, generator=generator, shuffle=True)
        return torch.cat([batch["draws"] for _ in range(2) for batch in loader])

    found = two_passes(0, 1)
    assert torch.equal(two_passes(0, 1), found)  # a run can be repeated
    every = torch.cat([found, two_passes(0, 2), two_passes(1, 3)])
    assert len(every.unique()) == every.numel()
    data.teardown("fit")


def test_a_pass_that_ends_early_or_lies_within_another(data):
    part = data.client_data(0).train

    def places(loader):
        return [batch["place"].tolist() for batch in loader]

    expected = places(part.loader(2))
    passes = part.loader(2), part.loader(2)
    for batch, place in zip(passes[0], expected, strict=True):
        assert batch["place"].tolist() == place
        assert places(passes[1]) == expected
    for _ in part.loader(2):
        break
    assert places(part.loader(2)) == expected


def test_evaluations_have_workers_of_their_own(data):
    parts = data.client_data(0)
    loader = iter(parts.train.loader(3))
    train, validation = next(loader), list(parts.validation.loader(4))
    assert processes([train]).isdisjoint(processes(validation))


def test_they_are_not_pickled(data):
    expected = batches(data, 1)
    again = pickle.loads(pickle.dumps(data))
    assert [b["place"].tolist() for b in batches(again, 1)] == [b["place"].tolist() for b in expected]
    again.teardown("fit")


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        raise KeyError(f"item {place}")


def test_an_error_in_a_worker_is_the_user_s():
    data = FromSilos([DataLoader(Broken(), batch_size=2, num_workers=1)], validation_share=0.0)
    data.setup()
    with pytest.raises(KeyError, match="item 0"):
        list(data.client_data(0).train.loader(2))
    data.teardown("fit")


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1, 0, 2]}], ids=["plain", "as it is"])
def test_one_client_at_a_time_has_workers(options):
    loaders = [DataLoader(Reading(), batch_size=3, num_workers=1, persistent_workers=True, **options) for _ in range(2)]
    data = FromSilos(loaders, validation_share=0.0)
    data.setup()
    first = processes(batches(data, 0))
    assert processes(batches(data, 0)) == first
    second = processes(batches(data, 1))
    assert len(pickle.loads(pickle.dumps(data)).client_data(1).train) == (3 if "sampler" in options else 24)
    assert not any(map(running, first))
    data.release()
    assert not any(map(running, second))


def test_loaders_whose_attributes_lightning_records_are_sent_without_processes():
    """It records them while it asks a hook for loaders, and from then on if that hook fails."""
    with _replace_dunder_methods(DataLoader, "dataset"):
        loader = DataLoader(Reading(), batch_size=3, num_workers=1, persistent_workers=True, sampler=[1, 0, 2])
        data = FromSilos([loader], validation_share=0.0)
        data.setup()
        assert processes(batches(data, 0))
        assert len(pickle.loads(pickle.dumps(data)).client_data(0).train) == 3
        data.release()


def test_settings_of_the_loader_hold():
    own = DataLoader(
        TensorDataset(torch.arange(6)), num_workers=1, prefetch_factor=5, timeout=60, multiprocessing_context="fork"
    )
    data = FromSilos([own], validation_share=0.0)
    data.setup()
    (source,) = data.sources()
    loader = source.workers._make(persistent=True)
    assert (loader.num_workers, loader.prefetch_factor, loader.timeout) == (1, 5, 60)
    assert loader.multiprocessing_context.get_start_method() == "fork"
