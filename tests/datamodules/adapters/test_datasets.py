"""Data sets of all kinds: a client's batches are those of a DataLoader over its items."""

from collections import namedtuple

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from pfl_lightning.datamodules import IID, FromLoaders

NUMBER = 24
Point = namedtuple("Point", ["x", "y"])


def tensors(number=NUMBER, start=0):
    return TensorDataset(torch.arange(start, start + number).float()[:, None], torch.arange(number) % 3)


class Columns:
    """A table that is asked for rows by numbers, lists or slices, and for several rows at once by DataLoaders."""

    def __init__(self):
        self.columns = {"text": [f"w{row}" for row in range(NUMBER)], "label": np.arange(NUMBER) % 3}

    def __len__(self):
        return NUMBER

    def __getitem__(self, rows):
        if isinstance(rows, list):
            return {name: [column[row] for row in rows] for name, column in self.columns.items()}
        return {name: column[rows] for name, column in self.columns.items()}

    def __getitems__(self, rows):
        found = self[rows]
        return [{name: column[place] for name, column in found.items()} for place in range(len(rows))]


class Nested(Dataset):
    def __len__(self):
        return NUMBER

    def __getitem__(self, place):
        return {"image": {"pixels": torch.full((2, 2), place), "id": f"i{place}"}, "point": Point(place, -place)}


class Graph:
    """A graph, of which several make one."""

    def __init__(self, nodes, sizes):
        self.nodes, self.sizes = nodes, sizes

    def to(self, device):
        return Graph(self.nodes.to(device), self.sizes)

    def __eq__(self, other):
        return torch.equal(self.nodes, other.nodes) and self.sizes == other.sizes


def joined(graphs):
    return Graph(torch.cat([graph.nodes for graph in graphs]), [len(graph.nodes) for graph in graphs])


class Whole(Dataset):
    """Gives whole batches where it is asked for a list."""

    def __len__(self):
        return NUMBER

    def __getitem__(self, places):
        return torch.as_tensor(places) * 2


def by_lists(dataset):
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(SequentialSampler(dataset), 5, False))


LOADERS = {
    "tensors": DataLoader(tensors(), 5),
    "subset": DataLoader(Subset(tensors(60), range(10, 10 + NUMBER)), 5),
    "random_split": DataLoader(random_split(tensors(30), [NUMBER, 6])[0], 5),
    "concatenated": DataLoader(ConcatDataset([tensors(10), Subset(tensors(40, 10), range(NUMBER - 10))]), 5),
    "stacked": DataLoader(StackDataset(image=tensors(), place=range(NUMBER)), 5),
    "table": DataLoader(Columns(), 5),
    "part of a table": DataLoader(Subset(Columns(), range(NUMBER)), 5),
    "nested": DataLoader(Nested(), 5),
    "graphs": DataLoader([Graph(torch.ones(n % 4), [n % 4]) for n in range(NUMBER)], 5, collate_fn=joined),
    "arrays": DataLoader(np.arange(NUMBER), 5),
    "lists of places": by_lists(Whole()),
    "whole batches": DataLoader([torch.full((3,), n) for n in range(NUMBER)], batch_size=None),
    "of a worker": DataLoader(Nested(), 5, num_workers=1),
    "lists of places of a worker": DataLoader(
        Whole(), batch_size=None, sampler=BatchSampler(SequentialSampler(Whole()), 5, False), num_workers=1
    ),
}


class Project(L.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return []

    def test_dataloader(self):
        return DataLoader([])


def same(one, two):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list | tuple) and type(one) is type(two):
        return len(one) == len(two) and all(same(*of) for of in zip(one, two, strict=True))
    return one == two


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_those_of_a_loader(kind, caplog):
    loader = LOADERS[kind]
    data = FromLoaders(IID(3), datamodule=Project(loader))
    data.setup()
    assert "neither val_dataloader nor test_dataloader" in caplog.text  # an empty one is none
    for client in range(3):
        train = data.client_data(client).train
        own = train.indices.tolist()
        size = 5 if kind != "whole batches" else 1
        batches = [own[start : start + size] for start in range(0, len(own), size)]
        if loader.batch_size is not None:
            expected = DataLoader(loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn)
        else:
            places = batches if size > 1 else own
            expected = DataLoader(loader.dataset, batch_size=None, sampler=places)
        got = list(train.loader(data.batch_size))
        assert len(got) == len(batches)
        for one, two in zip(got, expected, strict=True):
            assert same(one, two)
    data.release()
