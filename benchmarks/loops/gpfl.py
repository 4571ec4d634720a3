"""A round of GPFL (Zhang et al., ICCV 2023) in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Loop, Setting, State, copied, mean_of

MAGNITUDE, REGULARIZATION = 0.01, 0.1  # lambda, mu


class Valve(nn.Module):
    """The conditional valve, CoV."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """ReLU((gamma + 1) f + beta)."""
        return F.relu((self.gamma(condition) + 1) * features + self.beta(condition))


class Model(nn.Module):
    """Encoder, personal head, class embeddings (GCE) and valve."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        width = int(encoder.out_features)
        self.encoder, self.head = encoder, nn.Linear(width, classes)
        self.embeddings, self.valve = nn.Embedding(classes, width), Valve(width)


class GPFL(Loop):
    """Encoder, valve and embeddings are averaged, heads stay."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.model = Model(setting.make_encoder(), setting.classes).to(setting.dtype)

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        trained, sizes = list[State](), list[float]()
        for client, (_, labels) in enumerate(self.setting.data):
            self.model.load_state_dict({**self.server, **self.clients[client]}, strict=False)
            conditions = self.fit(client, number)
            self.clients[client] = {**copied(self.model, "head."), "conditions": conditions}
            trained.append(copied(self.model, "encoder.", "valve.", "embeddings."))
            sizes.append(len(labels))
        self.server = mean_of(trained, sizes)

    def fit(self, client: int, round: int) -> Tensor:
        """Train the model on a client's data; returns its two conditions."""
        model, (inputs, labels) = self.model, self.setting.data[client]
        received = model.embeddings.weight.detach().clone()
        shares = torch.bincount(labels, minlength=self.setting.classes).to(received) / len(labels)
        everyone, own = received.mean(dim=0), shares @ received  # g, p_i
        optimizer = torch.optim.SGD(self.groups(), **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            x, y = inputs[batch], labels[batch]
            features = model.encoder(x)
            personal, guided = model.valve(features, own), model.valve(features, everyone)  # f^P, f^G
            cosines = F.normalize(guided) @ F.normalize(model.embeddings.weight).T
            loss = F.cross_entropy(model.head(personal), y)  # L^P
            loss = loss + F.cross_entropy(cosines, y)  # L^alg
            loss = loss + MAGNITUDE * torch.linalg.vector_norm(guided - received[y])  # L^mlg
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.stack([everyone, own])

    def groups(self) -> list[dict[str, object]]:
        """Parameters; mu / 2 (|V|^2 + |C|^2) is weight decay of valve and embeddings, as in the published code."""
        model, decay = self.model, self.setting.sgd["weight_decay"]
        plain = [*model.encoder.parameters(), *model.head.parameters()]
        more = [*model.valve.parameters(), *model.embeddings.parameters()]
        return [{"params": plain}, {"params": more, "weight_decay": decay + REGULARIZATION}]
