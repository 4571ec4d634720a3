"""Clients that bring their own data modules, loaders and data sets."""

import pickle

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pfl_lightning.datamodules import IID, Digits, FromSilos, PartitionError
from pfl_lightning.datamodules.adapters.stages import GivenLoaders


def tensors(number, start=0):
    return TensorDataset(torch.arange(start, start + number).float()[:, None], torch.arange(number) % 3)


class Words(Dataset):
    """Items of which nothing is known until they are read."""

    def __init__(self, number):
        self.words, self.read = [f"w{place}" for place in range(number)], []

    def __len__(self):
        return len(self.words)

    def __getitem__(self, place):
        self.read.append(place)
        return self.words[place]


class Silo(L.LightningDataModule):
    vocabulary = ("a", "b")

    def __init__(self, train, val=None, test=None, **options):
        super().__init__()
        self.sets, self.options, self.calls = (train, val, test), options, []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        return DataLoader(self.sets[0], **{"batch_size": 4, "shuffle": True, **self.options})

    def val_dataloader(self):
        return [] if self.sets[1] is None else DataLoader(self.sets[1], batch_size=3)

    def test_dataloader(self):
        return None if self.sets[2] is None else DataLoader(self.sets[2], batch_size=3)


def ready(silos, **options):
    data = FromSilos(silos, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_every_client_has_its_own_sets_and_settings():
    silos = [
        Silo(tensors(10), tensors(5, 100), tensors(7, 200), drop_last=True),
        Silo(tensors(20, 10), test=tensors(2, 300), batch_size=6),
        DataLoader(tensors(30, 30), batch_size=7),
        tensors(8, 60),
    ]
    data = ready(silos, batch_size=2)
    assert silos[0].calls == silos[1].calls == ["prepare", "fit", "test"]
    assert (data.num_clients, data.num_classes, data.vocabulary) == (4, 3, ("a", "b"))
    parts = [data.client_data(client) for client in range(4)]
    assert [len(part.train) for part in parts] == [10, 18, 27, 7]
    assert [len(part.validation) for part in parts] == [5, 2, 3, 1]
    assert [len(part.test) for part in parts] == [7, 2, 0, 0]
    sizes = [(p.batches.batch_size, p.batches.eval_batch_size, p.batches.drop_last) for p in parts]
    assert sizes == [(4, 3, True), (6, 3, False), (7, 7, False), (2, 2, False)]
    for part, silo, first in zip(parts, silos, (0, 10, 30, 60), strict=True):
        assert part.train.datamodule is (silo if isinstance(silo, Silo) else None)
        own = [torch.cat([batch[0] for batch in split.loader(4)]) for split in (part.train, part.validation)]
        held = len(part.train) + len(part.validation) if part is not parts[0] else 10
        expected = list(range(first, first + held)) if part is not parts[0] else [*range(10), *range(100, 105)]
        assert sorted(torch.cat(own).flatten().int().tolist()) == expected
    assert torch.cat([batch[0] for batch in parts[1].test.loader(4)]).flatten().tolist() == [300.0, 301.0]
    assert data.class_counts().sum(1).tolist() == [10, 18, 27, 7]
    assert not parts[2].train.source.shuffled
    assert parts[3].train.source.shuffled


def test_items_without_classes_are_not_read():
    sets = [Words(6), Words(9)]
    data = ready([Silo(sets[0], sets[1]), sets[1]])
    assert sets[0].read == sets[1].read == []
    assert data.num_classes == 0
    assert next(iter(data.client_data(0).train.loader(2))) == ["w0", "w1"]


def test_the_division_is_that_of_the_seed():
    silos = [tensors(40), tensors(50)]
    one, two, other = ready(silos), ready(silos), ready(silos, seed=1)
    assert one.fingerprint == two.fingerprint != other.fingerprint
    again = pickle.loads(pickle.dumps(one))
    assert torch.equal(again.client_data(1).train.indices, one.client_data(1).train.indices)


@pytest.mark.parametrize(
    ("silos", "message"),
    [
        ([], "there are no silos: give one"),
        ([tensors(3), Digits(IID(2))], "silo 1 is a Digits, expected the data of one client"),
        ([tensors(3), TensorDataset(torch.zeros(0, 2))], "silo 1 is a TensorDataset, expected .*a Dataset with items"),
        ([tensors(3), 3], "silo 1 is a int, expected the data of one client: a LightningDataModule"),
        ([tensors(3), {"a": 1}], "silo 1 is a dict"),
        ([tensors(3), (DataLoader(tensors(3)), DataLoader(tensors(2)))], "silo 1 is a tuple, expected"),
    ],
)
def test_what_is_no_data_of_a_client(silos, message):
    with pytest.raises(ValueError, match=message):
        FromSilos(silos)


class Stream(IterableDataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(range(self.number))


def test_streams_are_read_in_their_own_order():
    silos = [Stream(7), Silo(Stream(9), Stream(5), Stream(3), shuffle=False, drop_last=True), list(range(20))]
    data = ready(silos, batch_size=3)
    parts = [data.client_data(client) for client in range(3)]
    assert [(len(p.train), len(p.validation), len(p.test)) for p in parts] == [(7, 0, 0), (9, 5, 3), (18, 2, 0)]
    generator = torch.Generator()
    for _ in range(2):  # from the beginning in every epoch
        loader = parts[0].train.loader(3, generator=generator, shuffle=True)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]
    loader = parts[1].train.loader(4, generator=generator, shuffle=True, drop_last=True)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2
    assert [batch.tolist() for batch in parts[1].validation.loader(3)] == [[0, 1, 2], [3, 4]]


def test_errors_name_the_client():
    with pytest.raises(TypeError, match="train_dataloader gives a range, expected a DataLoader") as caught:
        ready([tensors(3), GivenLoaders(range(3))])
    assert caught.value.__notes__ == ["while the data of client 1 were set up"]
    with pytest.raises(ValueError, match="the train set of client 1 is empty"):
        ready([tensors(3), DataLoader([])])
    with pytest.raises(
        PartitionError, match=r"drop_last leaves client 1 no batch \(1 such clients\): it has 3 training"
    ):
        ready([tensors(3), DataLoader(tensors(3), batch_size=4, drop_last=True)])


class Named(Dataset):
    def __init__(self, *classes):
        self.classes, self.targets = list(classes), [0, len(classes) - 1] * 3

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, place):
        return torch.zeros(3), self.targets[place]


def test_classes_of_silos_that_are_named_otherwise_are_warned_of(recwarn):
    with pytest.warns(UserWarning, match="class 0 is 'bird' in the data set of client 1 and 'cat' in that of client 0"):
        assert ready([Named("cat", "dog"), Named("bird", "cat")]).num_classes == 2
    recwarn.clear()
    for silos in ([Named("a", "b", "c"), Named("a")], [Named("a"), Named("a", "b", "c")]):
        assert ready(silos).class_names == ("a", "b", "c")
    assert not recwarn.list
