"""Data sets that hold all items in tensors or columns are read whole, and give what reading item by item gives."""

import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.datamodules.adapters.user_data import read_dataset

INPUTS = torch.randn(60, 2, 3, dtype=torch.float64)
CLASSES = torch.arange(60) % 4


class Columns:
    """As a data set of Hugging Face's in a format: an item or a slice gives a dictionary."""

    def __init__(self, kind, **columns):
        self.format, self.columns = {"type": kind}, columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, place):
        return {name: column[place] for name, column in self.columns.items()}


class ItemByItem:
    """The items of another data set, which nobody knows to be columns."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, place):
        return self.dataset[place]


frozen = INPUTS.numpy().copy()
frozen.flags.writeable = False
DATASETS = {
    "tensors": TensorDataset(INPUTS, CLASSES),
    "classes in rows of one": TensorDataset(INPUTS.float(), CLASSES[:, None]),
    "whole numbers as floats": TensorDataset(INPUTS.requires_grad_(), CLASSES.double()),
    "truths": TensorDataset(INPUTS, CLASSES > 1),
    "part": Subset(TensorDataset(INPUTS, CLASSES), [7, 3, 59]),
    "part of a part": Subset(Subset(TensorDataset(INPUTS, CLASSES), range(10, 40)), np.array([0, 29])),
    "torch": Columns("torch", image=INPUTS, label=CLASSES, other=CLASSES),
    "numpy": Columns("numpy", image=frozen, label=CLASSES.numpy().astype(np.uint8)),
    "numpy, ragged": Columns(
        "numpy", image=np.array([*INPUTS.detach().numpy(), None], dtype=object)[:-1], label=CLASSES.numpy()
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("labeled", [True, False])
@pytest.mark.parametrize("name", DATASETS)
def test_columns_give_what_items_give(name, labeled):
    dataset = DATASETS[name]
    for found, expected in zip(
        read_dataset(dataset, "set", labeled=labeled), read_dataset(ItemByItem(dataset), "set", labeled=labeled)
    ):
        assert torch.equal(found, expected)
        assert (found.dtype, found.requires_grad) == (expected.dtype, False)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(INPUTS, CLASSES / 3),
        TensorDataset(INPUTS, torch.full((60,), torch.nan)),
        TensorDataset(INPUTS, CLASSES, CLASSES),
        TensorDataset(INPUTS),
        TensorDataset(INPUTS, INPUTS),
        TensorDataset(torch.zeros(60, 8, 9, 3, dtype=torch.uint8), CLASSES),
        Columns("torch", picture=INPUTS, label=CLASSES),
        Columns("numpy", image=INPUTS.detach().numpy(), label=np.array(["cat"] * 60)),
    ],
)
def test_what_is_refused_of_items_is_refused_of_columns(dataset):
    with pytest.raises((TypeError, ValueError)) as one:
        read_dataset(dataset, "training set")
    with pytest.raises((TypeError, ValueError)) as other:
        read_dataset(ItemByItem(dataset), "training set")
    assert str(one.value) == str(other.value)


@pytest.mark.parametrize("kind", ["tensors", "part", "torch"])
def test_no_item_is_read_alone(kind):
    number, calls = 20_000, 0
    inputs, classes = torch.zeros(number, 3), torch.arange(number) % 3
    whole = TensorDataset(inputs, classes)
    datasets = {"tensors": whole, "part": Subset(whole, range(number)), "torch": Columns("torch", x=inputs, y=classes)}

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    data = FromDatasets(IID(1000), train=datasets[kind])
    sys.setprofile(count)
    try:
        data.setup()
    finally:
        sys.setprofile(None)
    assert calls < number


def test_tensors_are_not_copied():
    whole = TensorDataset(torch.zeros(1000, 1000), torch.arange(1000) % 3)
    inputs, _ = read_dataset(whole, "training set")
    assert inputs.data_ptr() == whole.tensors[0].data_ptr()
