"""Targets of any kind: nothing is asked of them where the division among clients needs no classes."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.toy import quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.datamodules import DirichletOverClients, PartitionError
from pfl_lightning.methods import FedAvg

NUMBER = 24


class Places:
    """Notes what is read: an object is shared by all clients, where a list would be each client's own."""

    def __init__(self) -> None:
        self.read: list[int] = []


class Items(Dataset):
    """Items made by a function of their place; it is noted which were read."""

    def __init__(self, make: Any) -> None:
        self.make, self.places = make, Places()

    @property
    def read(self) -> list[int]:
        return self.places.read

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, place: int) -> Any:
        self.read.append(place)
        return self.make(place)


class Graph:
    """What a graph library gives: an object with tensors, which can be moved."""

    def __init__(self, nodes: Any, owner: Any, y: Any) -> None:
        self.nodes, self.owner, self.y = nodes, owner, y

    def to(self, device: Any, **options: Any) -> "Graph":
        return Graph(self.nodes.to(device), self.owner.to(device), self.y.to(device))


def graphs(items: Any) -> Graph:
    owner = torch.repeat_interleave(torch.arange(len(items)), torch.tensor([len(item.nodes) for item in items]))
    return Graph(torch.cat([item.nodes for item in items]), owner, torch.stack([item.y for item in items]))


def listed(items: Any) -> Any:
    return tuple(zip(*items, strict=True))


def padded(items: Any) -> Any:
    return [pad_sequence([item[part] for item in items], batch_first=True) for part in (0, 1)]


class Project(L.LightningDataModule):
    def __init__(self, make: Any, collate: Any) -> None:
        super().__init__()
        self.train, self.val, self.collate = Items(make), Items(make), collate

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4, collate_fn=self.collate)


class Model(L.LightningModule):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 2), loss

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self, batch), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def inputs(place: int, *shape: int) -> Any:
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(place))


KINDS = {
    "text": (
        lambda place: (inputs(place, 5), torch.arange(5) % 2),
        None,
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    ),
    "text of any length": (
        lambda place: (inputs(place, 1 + place % 4), torch.arange(1 + place % 4) % 2),
        padded,
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    ),
    "mask": (
        lambda place: {"image": inputs(place, 4, 4), "label": torch.ones(4, 4, dtype=torch.int64)},
        None,
        lambda model, batch: F.cross_entropy(model(batch["image"]).movedim(-1, 1), batch["label"]),
    ),
    "several labels": (
        lambda place: (inputs(place), torch.tensor([place % 2, 1])),
        None,
        lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1].float()),
    ),
    "boxes": (
        lambda place: (inputs(place), {"boxes": torch.zeros(place % 3, 4), "labels": torch.ones(place % 3)}),
        listed,
        lambda model, batch: model(torch.stack(batch[0])).square().mean() + sum(b["boxes"].sum() for b in batch[1]),
    ),
    "graphs": (
        lambda place: Graph(inputs(place, 2 + place % 3), None, torch.tensor(place % 2)),
        graphs,
        lambda model, batch: F.cross_entropy(
            torch.zeros(len(batch.y), 2).index_add(0, batch.owner, model(batch.nodes)), batch.y
        ),
    ),
    "words": (
        lambda place: (inputs(place), f"item {place}"),
        None,
        lambda model, batch: model(batch[0]).square().mean(),
    ),
}


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_any_kind(kind, engine):
    make, collate, loss = KINDS[kind]
    data = Project(make, collate)
    federation, divided = federate(Model(loss), data, FedAvg, num_clients=3, engine=engine(), seed=1)
    divided.setup("fit")
    assert data.train.read == data.val.read == []  # nothing is read before round 0
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=divided)
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)
    assert sorted(data.train.read) == sorted([*range(NUMBER)] * 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "graphs"])
def test_a_rule_by_classes_stops_at_the_first_item_without_one(kind):
    make, collate, loss = KINDS[kind]
    data = Project(make, collate)
    _, divided = federate(Model(loss), data, FedAvg, DirichletOverClients(3))
    with pytest.raises(PartitionError, match=r"needs classes, .*labels=function of an item, such as"):
        divided.setup("fit")
    assert len(data.train.read) < NUMBER


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("graphs", lambda graph: graph.y),
        ("several labels", lambda item: item[1][0]),
        ("boxes", lambda item: len(item[1]["boxes"])),
    ],
)
def test_labels_say_what_the_class_is(kind, labels):
    make, collate, loss = KINDS[kind]
    federation, data = federate(
        Model(loss),
        Project(make, collate),
        FedAvg,
        DirichletOverClients(3, alpha=5.0, min_samples=1),
        labels=labels,
        seed=1,
    )
    quiet_trainer(1).fit(federation, datamodule=data)
    counts = sum(data.client_data(client).train.class_counts(3) for client in range(3))
    assert (
        counts.tolist() == torch.tensor([labels(make(place)) for place in range(NUMBER)]).bincount(minlength=3).tolist()
    )


def test_accuracy_is_known_where_the_batches_show_classes():
    data = Project(lambda place: (inputs(place), place % 2), None)
    federation, divided = federate(
        Model(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])), data, FedAvg, num_clients=3, seed=1
    )
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=divided)
    assert 0 <= float(trainer.callback_metrics["val_accuracy/mean"]) <= 1
    with torch.no_grad():
        for client, score in federation.validation_scores.items():
            items = [data.val.make(place) for place in divided.client_data(client).validation.indices.tolist()]
            found = federation.client_model(client)(torch.stack([item[0] for item in items])).argmax(1)
            assert score.accuracy == pytest.approx(
                sum(f == c for f, (_, c) in zip(found, items, strict=True)) / len(items)
            )
