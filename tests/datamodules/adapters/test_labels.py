"""Names of classes: one label far from the others is a mistake, and makes no model of 501 classes."""

import lightning as L
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from pfl_lightning.datamodules import IID, FromDatasets, FromLoaders
from pfl_lightning.datamodules.adapters.labels import classes_of, names_of_classes
from pfl_lightning.datamodules.partition.base import PartitionError


class Named(TensorDataset):
    classes = ("a", "b")


class Project(L.LightningDataModule):
    def __init__(self, train):
        super().__init__()
        self.train = train

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=5)


class ByClass(IID):
    """A rule that asks for classes."""

    needs_labels = True


def data(last, kind=TensorDataset):
    return kind(torch.rand(20, 4), torch.tensor([0, 1] * 9 + [0, last]))


def modules(train, **options):
    yield FromDatasets(IID(2), train=train, **options)
    yield FromLoaders(ByClass(2), datamodule=Project(train), **options)


@pytest.mark.parametrize(
    ("kind", "last", "message"),
    [
        (TensorDataset, 500, "labels go up to 500, and 498 of the 501 classes from 0 have no item"),
        (Named, 2, "the data set names 2 classes, but has an item of class 2"),
    ],
)
def test_a_label_far_from_the_others_is_refused(kind, last, message):
    for module in modules(data(last, kind)):
        with pytest.raises(ValueError, match=message):
            module.setup("fit")


def test_it_is_accepted_where_all_classes_are_named():
    for module in modules(data(500), class_names=[str(c) for c in range(501)]):
        module.setup("fit")
        assert module.num_classes == 501


def test_a_class_may_be_missing():
    for module in modules(data(4)):
        module.setup("fit")
        assert module.num_classes == 5


class Unread(Dataset):
    """Items that must not be read."""

    def __init__(self, targets=None):
        if targets is not None:
            self.targets = targets

    def __len__(self):
        return 4

    def __getitem__(self, place):
        raise AssertionError("not to be read")


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Unread(), None),
        (Subset(Unread(), [1]), None),
        (ConcatDataset([Unread([0, 1, 2, 0]), Subset(Unread([3, 4, 5, 6]), [2])]), [0, 1, 2, 0, 5]),
        (ConcatDataset([Unread([0, 1, 2, 0]), Unread()]), None),
        (Unread([0, 1]), None),  # not one an item
        (Unread({0: "a", 1: "b", 2: "c", 3: "d"}), None),
        (Unread([torch.zeros(2, dtype=torch.int64)] * 4), None),
    ],
)
def test_classes_that_are_known_without_reading(dataset, expected):
    found = classes_of(dataset, read=False)
    assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Unread([torch.zeros(2, dtype=torch.int64)] * 4), None),  # several labels an item
        (Subset([("a", 0), ("b", torch.zeros(2)), ("c", 2)], [2, 0]), [2, 0]),  # the others are not read
    ],
)
def test_classes_of_items(dataset, expected):
    found = classes_of(dataset)
    assert (None if found is None else found.tolist()) == expected


class Transformed(Unread):
    """As torchvision's: ``targets`` are the numbers of folders, from which a transform makes the class."""

    classes = ("bird", "car", "cat", "ship")

    def target_transform(self, number):
        return int(number in (0, 2))


def test_classes_are_those_that_a_transform_makes():
    dataset = Transformed([0, 1, 2, 3])
    assert classes_of(dataset, read=False).tolist() == [1, 0, 1, 0]
    assert names_of_classes(None, dataset, {"train": classes_of(dataset)}) == ("0", "1")


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_transform_gets_numbers_as_torchvision_hands_them(kind):
    class Mapped(Unread):
        target_transform = staticmethod({0: 3, 1: 2, 2: 1, 3: 0}.__getitem__)

    assert classes_of(Mapped(kind([0, 1, 2, 3])), read=False).tolist() == [3, 2, 1, 0]


def test_vectors_of_classes_leave_the_classes_as_they_are():
    class OneHot(Unread):
        classes = ("bird", "car", "cat", "ship")
        target_transform = staticmethod(lambda number: torch.eye(4)[number])

    dataset = OneHot([0, 1, 2, 3])
    assert classes_of(dataset, read=False).tolist() == [0, 1, 2, 3]
    assert names_of_classes(None, dataset, {"train": classes_of(dataset)}) == OneHot.classes


def test_names_of_a_part_are_those_of_the_whole():
    whole = Unread([0, 1, 2, 3])
    whole.classes = ("bird", "car", "cat", "ship")
    assert names_of_classes(None, Subset(whole, [3]), {"train": classes_of(Subset(whole, [3]))}) == whole.classes


def test_what_labels_cannot_say_is_named():
    with pytest.raises(ValueError, match=r"got tensor\(\[0., 0.\]\) for item 0: correct labels"):
        classes_of([torch.zeros(2)], labels=lambda item: item)
    with pytest.raises(KeyError) as caught:
        classes_of([{"y": 0}, {}], labels=lambda item: item["y"])
    assert caught.value.__notes__ == ["while labels was called with item 1 of the data set"]


def test_numbers_that_are_no_classes_are_none_where_nobody_asks_for_classes():
    prices = TensorDataset(torch.rand(20, 4), torch.arange(20) * 100)
    module = FromLoaders(IID(2), datamodule=Project(prices))
    module.setup("fit")
    assert (module.num_classes, len(module.client_data(0).train)) == (0, 7)


def test_numbers_of_which_most_are_there_once_are_no_classes_with_a_test_set_either():
    def numbers(count, seed):
        return TensorDataset(torch.rand(count, 4), torch.randint(300, (count,), generator=torch.manual_seed(seed)))

    class WithTest(Project):
        def val_dataloader(self):
            return DataLoader(numbers(40, 1), 10)

    module = FromLoaders(IID(20), datamodule=WithTest(numbers(400, 0)))
    module.setup("fit")
    assert (module.num_classes, len(module.client_data(0).train)) == (0, 20)


def test_numbers_that_are_each_there_once_are_no_classes_where_items_are_set_aside_for_tests():
    numbered = FromLoaders(IID(2), datamodule=Project(TensorDataset(torch.rand(40, 4), torch.arange(40))))
    numbered.setup("fit")
    assert [len(numbered.client_data(client).test) for client in range(2)] == [10, 10]
    with pytest.raises(PartitionError, match="leaves no test sample"):
        FromLoaders(ByClass(2), datamodule=Project(TensorDataset(torch.rand(40, 4), torch.arange(40)))).setup("fit")
