"""Classes of graphs, which torch_geometric keeps in their attribute ``y``."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.toy import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pfl_lightning import federate
from pfl_lightning.data import class_of_batch
from pfl_lightning.datamodules import DominantClasses
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedPAC

CLASSES = 3


class Graph:
    """What is asked of torch_geometric's ``Data``, and of its ``Batch`` where ``num_graphs`` is given."""

    def __init__(self, x: Tensor, y: Any, owner: Any = None) -> None:
        self.x, self.y, self.owner = x, y, owner
        if owner is not None:
            self.num_graphs = int(owner.max()) + 1

    @property
    def num_nodes(self) -> int:
        return len(self.x)

    def to(self, device: Any, **options: Any) -> Graph:
        return self


def collate(graphs: Any) -> Graph:
    owner = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor([graph.num_nodes for graph in graphs]))
    return Graph(torch.cat([graph.x for graph in graphs]), torch.cat([graph.y for graph in graphs]), owner)


def graphs(per_node: bool = False) -> list[Graph]:
    draw = torch.Generator().manual_seed(0)
    sizes = [3 + place % 4 for place in range(36)]
    return [
        Graph(torch.randn(size, 6, generator=draw) + place % CLASSES, torch.full((size if per_node else 1,), place % 3))
        for place, size in enumerate(sizes)
    ]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Linear(6, 4), nn.Linear(4, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        nodes = torch.tanh(self.embed(batch.x))
        return self.fc(torch.zeros(batch.num_graphs, 4).index_add(0, batch.owner, nodes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch), batch.y[: batch.num_graphs])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(items: list[Graph]) -> DataLoader[Any]:
    return DataLoader(items, batch_size=5, collate_fn=collate, shuffle=True)  # type: ignore[arg-type]


def fitted(items: list[Graph], **options: Any) -> Any:
    federation, data = federate(
        Net(), train_dataloaders=loader(items), val_dataloaders=loader(items), method=FedPAC, **options
    )
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    return federation, data


@pytest.mark.parametrize("labels", [None, lambda graph: int(graph.y)], ids=["none", "of an item"])
def test_they_are_read_by_methods_on_features_and_in_evaluations(labels):
    federation, data = fitted(graphs(), num_clients=2, labels=labels)
    for client, score in federation.validation_scores.items():
        model, items = federation.client_model(client).eval(), data.client_data(client).validation
        right = [model(batch).argmax(1) == batch.y for batch in items.loader(5)]
        assert score.accuracy == pytest.approx(float(torch.cat(right).float().mean()))


def test_partitions_read_them():
    _, data = fitted(graphs(), partition=DominantClasses(3, samples_per_client=6))
    for client in range(3):
        part = data.client_data(client).train
        own = torch.cat([batch.y for batch in part.loader(5)])
        assert part.class_counts(CLASSES).tolist() == torch.bincount(own, minlength=CLASSES).tolist()


def test_those_of_nodes_are_not_read():
    batch = collate(graphs(per_node=True))
    assert class_of_batch(batch) is None
    with pytest.raises(ConfigurationError, match=r"a batch here is a Graph .* such as lambda batch: batch\.y"):
        fitted(graphs(per_node=True), num_clients=2)
