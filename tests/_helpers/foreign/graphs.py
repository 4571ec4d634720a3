"""Graph networks of torch_geometric, in a thin module, over its own loaders."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from _helpers.foreign.project import Made, Project


def graph(place: int) -> Any:
    """A ring, with features that tell its class."""
    from torch_geometric.data import Data

    nodes, draw = 3 + place % 4, torch.Generator().manual_seed(place)
    around = torch.arange(nodes)
    edges = torch.stack([around, (around + 1) % nodes])
    return Data(x=torch.randn(nodes, 4, generator=draw) + place % 2, edge_index=edges, y=torch.tensor([place % 2]))


class GraphClassifier(L.LightningModule):
    """A graph network, a mean over nodes, and a linear layer."""

    def __init__(self) -> None:
        from torch_geometric.nn import GIN

        super().__init__()
        self.network, self.classify = GIN(4, 8, num_layers=2, norm="batch_norm"), nn.Linear(8, 2)

    def forward(self, data: Any) -> Any:
        from torch_geometric.nn import global_mean_pool

        return self.classify(global_mean_pool(self.network(data.x, data.edge_index), data.batch))

    def training_step(self, data: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(data), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(data), data.y), batch_size=data.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def classifier() -> Made:
    from torch_geometric.loader import DataLoader

    train, validation = [graph(place) for place in range(36)], [graph(place) for place in range(36, 48)]
    return GraphClassifier(), {
        "train_dataloaders": DataLoader(train, batch_size=6),
        "val_dataloaders": DataLoader(validation, batch_size=6),
    }


def with_datamodule() -> Made:
    """Through the package's own LightningDataset."""
    from torch_geometric.data.lightning import LightningDataset

    train, validation = [graph(place) for place in range(36)], [graph(place) for place in range(36, 48)]
    return GraphClassifier(), {"datamodule": LightningDataset(train, validation, batch_size=6)}


PROJECTS = [
    Project("graphs", "torch-geometric", "GIN", "Batch of graphs", classifier, ("torch_geometric",), head="classify"),
    Project(
        "graphs",
        "torch-geometric",
        "GIN, LightningDataset",
        "Batch of graphs",
        with_datamodule,
        ("torch_geometric",),
        head="classify",
    ),
]
