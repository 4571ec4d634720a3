"""Samplers and batch samplers of the user's: what a client gets of them."""

import random
import threading
import warnings

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pfl_lightning.datamodules import IID, FromLoaders, FromSilos
from pfl_lightning.datamodules.adapters import samplers
from pfl_lightning.datamodules.adapters.samplers import places_of

lock = threading.Lock()  # cannot be copied

NUMBER = 40
ITEMS = TensorDataset(torch.arange(NUMBER), torch.arange(NUMBER) % 2)


class Project(L.LightningDataModule):
    def __init__(self, train, val=None):
        super().__init__()
        self.loaders = train, val or DataLoader(ITEMS, 10)

    def train_dataloader(self):
        return self.loaders[0]

    def val_dataloader(self):
        return self.loaders[1]


def ready(loader, val=None):
    data = FromLoaders(IID(4, seed=3), datamodule=Project(loader, val))
    data.setup()
    return data


def flat(lists):
    return [place for one in lists for place in one]


def passes(split, number=1, seed=1):
    loader = split.loader(4, generator=torch.Generator().manual_seed(seed), shuffle=True)
    return [[batch[0].tolist() for batch in loader] for _ in range(number)]


class Backwards(Sampler):
    """Even items alone, from the last to the first."""

    def __iter__(self):
        return iter(range(NUMBER - 2, -1, -2))

    def __len__(self):
        return NUMBER // 2


class Buckets(Sampler):
    """Batches of eight neighbors, in an order drawn by Python's generator."""

    def __iter__(self):
        starts = list(range(0, NUMBER, 8))
        random.shuffle(starts)
        return iter([list(range(start, start + 8)) for start in starts])


def test_a_subset_sampler_says_what_is_divided():
    data = ready(DataLoader(ITEMS, 4, sampler=SubsetRandomSampler(range(5, 25))))
    seen = [flat(passes(data.client_data(client).train)[0]) for client in range(4)]
    assert sorted(flat(seen)) == list(range(5, 25))
    assert seen[0] != sorted(seen[0])


def test_weights_hold_among_a_client_s_items():
    weights = torch.tensor([0.0, 1.0]).repeat(NUMBER // 2)
    data = ready(DataLoader(ITEMS, 4, sampler=WeightedRandomSampler(weights.tolist(), 2 * NUMBER)))
    for client in range(4):
        train = data.client_data(client).train
        one, two = passes(train, 2)
        assert passes(train, 2) == [one, two]
        assert one != two
        assert [len(batch) for batch in one] == [4] * 5  # five of twenty items with a weight: twenty of eighty draws
        assert len(train.loader(4, generator=torch.Generator(), shuffle=True)) == 5
        own = set(flat(batch[0].tolist() for batch in train.loader(4)))
        assert len(own) == len(train) == 5
        assert all(place % 2 == 1 and place in own for batch in one for place in batch)


def test_a_random_sampler_of_fewer_items():
    data = ready(DataLoader(ITEMS, 4, sampler=RandomSampler(ITEMS, num_samples=20)))
    (one,) = passes(data.client_data(0).train)
    assert [len(batch) for batch in one] == [4, 1]
    assert len(set(flat(one))) == 5


@pytest.mark.parametrize("stage", ["train", "validation"])
def test_any_sampler_gives_a_client_its_own_items_in_its_order(stage):
    loader = DataLoader(ITEMS, 4, sampler=Backwards())
    data = ready(loader) if stage == "train" else ready(DataLoader(ITEMS, 4, shuffle=True), loader)
    for client in range(4):
        split = getattr(data.client_data(client), stage)
        own = sorted((2 * place for place in split.indices.tolist()), reverse=True)  # the even ones are divided
        assert len(own) == (5 if stage == "train" else 10)
        trains = {"shuffle": True, "generator": torch.Generator()} if stage == "train" else {}
        got = [batch[0].tolist() for batch in split.loader(4, **trains)]
        assert got == [own[start : start + 4] for start in range(0, len(own), 4)]


BATCHES = BatchSampler(WeightedRandomSampler([1.0] * NUMBER, 8), 4, False)


@pytest.mark.parametrize("kind", [{"sampler": Backwards(), "batch_size": 4}, {"batch_sampler": BATCHES}])
@pytest.mark.parametrize("divided", [True, False])
def test_a_pass_over_all_training_items_leaves_none_out(kind, divided):
    """Of which methods take the statistics that they send: a sampler gives some of them in a pass, or some twice."""
    loader = DataLoader(ITEMS, **kind)
    data = ready(loader) if divided else FromSilos([loader])
    data.setup()
    split = data.client_data(0).train
    every = 2 if "sampler" in kind else 1  # the even ones are all that the sampler ever gives
    assert flat([batch[0].tolist() for batch in split.loader(7)]) == [every * place for place in split.indices.tolist()]
    assert len(split) == NUMBER // every // (4 if divided else 1)


PART = range(6, 20)
OF_A_PART = {
    "list": {"sampler": [*PART], "batch_size": 4},
    "subset sampler": {"sampler": SubsetRandomSampler(PART), "batch_size": 4},
    "sampler of a collection": {"sampler": RandomSampler(range(14)), "batch_size": 4},
    "weights": {"sampler": WeightedRandomSampler([float(i in PART) for i in range(NUMBER)], 30), "batch_size": 4},
    "own sampler": {"sampler": SubsetRandomSampler([*PART, *PART]), "batch_size": 4},
    "list of batches": {"batch_sampler": [[6, 7, 8, 9], [*range(10, 20), 6]]},
    "batches of a subset": {"batch_sampler": BatchSampler(SubsetRandomSampler(PART), 4, False)},
}


class Repeating(Sampler):
    """A part of the items, each twice."""

    def __iter__(self):
        return iter(torch.tensor([*PART, *PART])[torch.randperm(28)])

    def __len__(self):
        return 28


@pytest.mark.parametrize("name", OF_A_PART)
@pytest.mark.parametrize("divided", [True, False])
def test_what_a_loader_never_gives_is_nobody_s(name, divided):
    """Neither in local fits, nor in statistics, nor in the number by which a client counts: it may be for tests."""
    options = {"sampler": Repeating(), "batch_size": 4} if name == "own sampler" else OF_A_PART[name]
    part = set(range(14)) if name == "sampler of a collection" else set(PART)
    loader = DataLoader(ITEMS, **options)
    data = ready(loader) if divided else FromSilos([loader], validation_share=0.0)
    data.setup()
    splits = [data.client_data(client).train for client in range(4 if divided else 1)]
    read = flat(batch[0].tolist() for split in splits for batch in split.loader(5))
    assert sorted(read) == sorted(part)
    assert sum(len(split) for split in splits) == len(part)
    fitted = flat(flat(passes(split, 3)) for split in splits)
    assert set(flat(fitted)) == part
    assert all(split.class_counts(2).sum() == len(split) for split in splits)


class ByRound(Sampler):
    """More items in each epoch."""

    def __init__(self, own):
        self.own, self.epoch = own, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(min(NUMBER, 10 + self.epoch)))


def test_what_a_later_pass_may_give_is_not_left_out():
    assert places_of(ByRound(None), NUMBER) is None
    assert places_of(RandomSampler(ITEMS, num_samples=39), NUMBER) is None
    assert places_of(WeightedRandomSampler([1.0] * NUMBER, 3), NUMBER) is None
    assert places_of(Endless(), NUMBER) is None
    assert places_of(Backwards(), NUMBER) == list(range(0, NUMBER, 2))
    uncopied = ByRound(lock)
    assert places_of(uncopied, NUMBER) is None


@settings(deadline=None)  # a busy machine takes longer
@given(st.data())
def test_places_are_those_that_are_given(data):
    length = data.draw(st.integers(1, 30))
    part = data.draw(st.lists(st.integers(0, length - 1), min_size=1))
    expected = sorted(set(part)) if len(set(part)) < length else None
    batches = [part[start : start + 3] for start in range(0, len(part), 3)]
    assert places_of(batches, length) == expected
    assert places_of([torch.tensor(batch) for batch in batches], length) == expected
    found = places_of(part, length)
    assert found == (part if len(set(part)) == len(part) else expected)  # the order of a list is kept


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 3


@pytest.mark.parametrize(
    "kind", [{"sampler": Endless(), "batch_size": 4}, {"batch_sampler": BatchSampler(Endless(), 2, False)}]
)
def test_a_sampler_without_an_end_is_refused(kind, monkeypatch):
    monkeypatch.setattr(samplers, "MAX_PLACES", 100)
    split = ready(DataLoader(ITEMS, **kind)).client_data(0).train
    with pytest.raises(ValueError, match=r"over 40 items has given 400 of them and does not stop.*list of loaders"):
        passes(split)


class ByEpoch(Sampler):
    """The items from the epoch's number on."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(place + self.epoch) % NUMBER for place in range(NUMBER)])

    def __len__(self):
        return NUMBER


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_sampler_is_told_the_epoch(divided, batched):
    own = ByEpoch()
    loader = (
        DataLoader(ITEMS, batch_sampler=BatchSampler(own, 4, False)) if batched else DataLoader(ITEMS, 4, sampler=own)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = ready(loader) if divided else FromSilos([loader])
        data.setup()
    split = data.client_data(0).train
    held = set(split.indices.tolist())
    loader = split.loader(4, generator=torch.Generator().manual_seed(1), shuffle=True)

    def one_pass():
        return flat([batch[0].tolist() for batch in loader])

    others = [one_pass(), one_pass()]  # by an engine that counts no epochs
    assert others[0] != others[1]
    for epoch in (0, 5, 39):
        _set_sampler_epoch(loader, epoch)  # as a Trainer calls it
        assert one_pass() == [(place + epoch) % NUMBER for place in range(NUMBER) if (place + epoch) % NUMBER in held]


class Doubling(DataLoader):
    """Changes batches on their way."""

    def __iter__(self):
        return ([2 * part for part in batch] for batch in super().__iter__())


def test_a_loader_with_a_pass_of_its_own():
    with pytest.warns(UserWarning, match="Doubling has its own __iter__, which is not called"):
        split = ready(Doubling(ITEMS, 4)).client_data(0).train
    assert sorted(flat(passes(split)[0])) == sorted(split.indices.tolist())
    alone = FromSilos([Doubling(ITEMS, 4)])
    alone.setup()
    assert flat(passes(alone.client_data(0).train)[0]) == list(range(0, 2 * NUMBER, 2))


def test_a_batch_sampler_gives_a_client_its_own_items_of_each_batch():
    with pytest.warns(UserWarning, match="from each batch of the Buckets a client gets only its own items"):
        data = ready(DataLoader(ITEMS, batch_sampler=Buckets()))
    state = random.getstate()
    for client in range(4):
        train = data.client_data(client).train
        one, two = passes(train, 2)
        assert passes(train, 2) == [one, two]
        assert sorted(flat(one)) == sorted(flat(two)) == sorted(train.indices.tolist())
        assert all(len({place // 8 for place in batch}) == 1 for batch in one)
    assert random.getstate() == state
    orders = [[batch[0] // 8 for batch in passes(data.client_data(0).train, seed=seed)[0]] for seed in range(5)]
    assert len(set(map(tuple, orders))) > 1


class Shuffling(Sampler):
    """Shuffles its own list in each pass."""

    def __init__(self):
        self.order, self.items = list(range(NUMBER)), ITEMS

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self):
        return NUMBER


@pytest.mark.parametrize("options", [{"sampler": Shuffling()}, {"batch_sampler": BatchSampler(Shuffling(), 4, False)}])
def test_what_a_sampler_changes_of_itself_reaches_no_other_pass(options):
    """So that a pass does not depend on those before it: a resumed run has the batches of an uninterrupted one."""
    split = ready(DataLoader(ITEMS, **options)).client_data(1).train
    first, second = passes(split, number=2)
    assert passes(split) == [first] != [second]
    assert sorted(flat(first)) == sorted(flat(second)) == split.indices.tolist()


@pytest.mark.parametrize("order", [RandomSampler, SequentialSampler])
def test_torch_s_own_batch_sampler_is_a_batch_size(order):
    data = ready(DataLoader(ITEMS, batch_sampler=BatchSampler(order(ITEMS), 7, drop_last=True)))
    assert (data.batch_size, data.drop_last) == (7, True)
    assert data.client_data(0).train.source.order is None
    assert data.client_data(0).train.source.shuffled == (order is RandomSampler)


def test_evaluations_have_their_own_loader_s_batches():
    class Both(Project):
        def test_dataloader(self):
            return DataLoader(ITEMS, 6)

    data = FromLoaders(IID(2), datamodule=Both(DataLoader(ITEMS, 3), DataLoader(ITEMS, 5)))
    data.setup()
    parts = data.client_data(0)
    sizes = [len(next(iter(part.loader(100)))[0]) for part in (parts.validation, parts.test)]
    assert sizes == [5, 6]


class Stream(IterableDataset):
    """Items of an unknown number."""

    def __iter__(self):
        return iter(range(7))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(ITEMS, 8, sampler=Backwards()), [list(range(38, 22, -2)), list(range(22, 6, -2)), [6, 4, 2, 0]]),
        (DataLoader(ITEMS, batch_sampler=[[3, 1], [5]]), [[3, 1], [5]]),
        (DataLoader(Stream(), 3), [[0, 1, 2], [3, 4, 5], [6]]),
        (DataLoader(Stream(), 3, num_workers=1), [[0, 1, 2], [3, 4, 5], [6]]),
        (DataLoader(Stream(), 3, drop_last=True), [[0, 1, 2], [3, 4, 5]]),
        (DataLoader(Stream(), batch_size=None), list(range(7))),
    ],
    ids=["sampler", "batch sampler", "stream", "with a worker", "drop_last", "single items"],
)
def test_a_loader_of_one_client_is_used_as_it_is(loader, expected):
    data = FromSilos([loader])
    data.setup()
    parts = data.client_data(0)
    assert len(parts.validation) == 0  # nothing can be set aside
    batches = parts.train.loader(100, generator=torch.Generator(), shuffle=True, drop_last=True)
    for _ in range(2):
        got = [batch[0] if isinstance(batch, list) else batch for batch in batches]
        assert [g.tolist() if isinstance(g, torch.Tensor) else g for g in got] == expected
    data.release()


def test_clients_weigh_what_a_stream_has_given():
    data = FromSilos([DataLoader(Stream(), 3), DataLoader(ITEMS, 3)])
    data.setup()
    assert len(data.client_data(0).train) == 1
    list(data.client_data(0).train.loader(3))
    assert len(data.client_data(0).train) == 7
