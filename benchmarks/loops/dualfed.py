"""A round of DualFed (Zhu et al., ACM MM 2024) in plain PyTorch; numbers are of the paper's equations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Loop, Setting, State, copied, mean_of

TEMPERATURE, HIDDEN = 0.2, 256  # tau


class Model(nn.Module):
    """Encoder, projector, and the classifiers on either side of it."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        width = int(encoder.out_features)
        self.encoder, self.head, self.global_head = encoder, nn.Linear(width, classes), nn.Linear(width, classes)
        self.projector = nn.Sequential(
            nn.Linear(width, HIDDEN), nn.ReLU(), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, width), nn.BatchNorm1d(width)
        )


def contrast(projected: Tensor, labels: Tensor) -> Tensor:
    """The supervised contrastive loss of one view (7)."""
    rows = F.normalize(projected)
    itself = torch.eye(len(rows), dtype=torch.bool)
    positives = (labels[:, None] == labels) & ~itself
    shares = (rows @ rows.T / TEMPERATURE).masked_fill(itself, -torch.inf).log_softmax(dim=1)
    sums = shares.masked_fill(~positives, 0).sum(dim=1)
    return -(sums / positives.sum(dim=1).clamp(min=1)).mean()


class DualFed(Loop):
    """Encoders and global classifiers are averaged, projectors and personal classifiers stay."""

    def __init__(self, setting: Setting, contrastive: float = 40.0) -> None:
        super().__init__(setting)
        self.contrastive = contrastive  # lambda
        self.model = Model(setting.make_encoder(), setting.classes).to(setting.dtype)

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        trained = list[State]()
        for client in range(len(self.setting.data)):
            self.model.load_state_dict({**self.server, **self.clients[client]})
            self.first_stage(client, number)
            self.second_stage(client, number)
            self.clients[client] = copied(self.model, "projector.", "head.")
            trained.append(copied(self.model, "encoder.", "global_head."))
        self.server = mean_of(trained, [1] * len(trained))  # (11)

    def first_stage(self, client: int, round: int) -> None:
        """Encoder, projector and personal classifier (8)."""
        model, (inputs, labels) = self.model.train(), self.setting.data[client]
        parts = (model.encoder, model.projector, model.head)
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            projected = model.projector(model.encoder(inputs[batch]))
            loss = F.cross_entropy(model.head(projected), labels[batch])  # (6)
            loss = loss + self.contrastive * contrast(projected, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def second_stage(self, client: int, round: int) -> None:
        """The global classifier (10), on features that no longer change."""
        model, (inputs, labels) = self.model.eval(), self.setting.data[client]
        with torch.no_grad():
            features = torch.cat([model.encoder(part) for part in inputs.split(128)])
        optimizer = torch.optim.SGD(model.global_head.parameters(), **self.setting.sgd)
        for batch in self.setting.batches(client, round, phase=1):
            loss = F.cross_entropy(model.global_head(features[batch]), labels[batch])  # (9)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
