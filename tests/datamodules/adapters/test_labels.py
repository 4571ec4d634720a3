"""Names of classes: one label far from the others is a mistake, and makes no model of 501 classes."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning.datamodules import IID, FromDatasets, FromLoaders


class Named(TensorDataset):
    classes = ("a", "b")


class Project(L.LightningDataModule):
    def __init__(self, train):
        super().__init__()
        self.train = train

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=5)


def data(last, kind=TensorDataset):
    return kind(torch.rand(20, 4), torch.tensor([0, 1] * 9 + [0, last]))


def modules(train, **options):
    yield FromDatasets(IID(2), train=train, **options)
    yield FromLoaders(IID(2), datamodule=Project(train), **options)


@pytest.mark.parametrize(
    ("kind", "last", "message"),
    [
        (TensorDataset, 500, "labels go up to 500, and 498 of the 501 classes from 0 have no item"),
        (Named, 2, "the data set names 2 classes, and has an item of class 2"),
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
