"""A round of pFedHN (Shamsian et al., ICML 2021) in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Loop, Setting, State, copied

HIDDEN, LAYERS, CLIP = 100, 3, 50.0
SERVER_SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}
MOMENTUM = "momentum of "
"""Names in the server's state: the momentum of a parameter."""


class Hypernetwork(nn.Module):
    """h(v_i; phi), with a linear layer to each tensor of the clients' model."""

    def __init__(self, clients: int, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        width = 1 + clients // 4
        self.embeddings = nn.Embedding(clients, width)
        layers: list[nn.Module] = [nn.Linear(width, HIDDEN)]
        for _ in range(LAYERS):
            layers += [nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)]
        self.body = nn.Sequential(*layers)
        outputs = {name.replace(".", "/"): nn.Linear(HIDDEN, shape.numel()) for name, shape in shapes.items()}
        self.outputs = nn.ModuleDict(outputs)

    def forward(self, client: int) -> dict[str, Tensor]:
        """The parameters of a client."""
        hidden = self.body(self.embeddings.weight[client])
        return {name: self.outputs[name.replace(".", "/")](hidden).view(shape) for name, shape in self.shapes.items()}


class PFedHN(Loop):
    """The server's hypernetwork generates models; what their training changes is its gradient."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        encoder = setting.make_encoder()
        head = nn.Linear(int(encoder.out_features), setting.classes)
        self.model = nn.ModuleDict({"encoder": encoder, "head": head}).to(setting.dtype)
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        self.network = Hypernetwork(len(setting.data), shapes).to(setting.dtype)
        self.optimizer = torch.optim.SGD(self.network.parameters(), **SERVER_SGD)

    def load(self, server: State, clients: Sequence[State]) -> None:
        """Start from the parameters of the hypernetwork and their momenta."""
        self.network.load_state_dict({name: value for name, value in server.items() if not name.startswith(MOMENTUM)})
        for name, parameter in self.network.named_parameters():
            if MOMENTUM + name in server:
                self.optimizer.state[parameter]["momentum_buffer"] = server[MOMENTUM + name].clone()

    def state(self) -> tuple[State, list[State]]:
        """The parameters of the hypernetwork and their momenta."""
        momenta = {MOMENTUM + name: self.optimizer.state[p]["momentum_buffer"] for name, p in self.parameters()}
        return {**self.network.state_dict(), **momenta}, self.clients

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of the hypernetwork, by name."""
        return list(self.network.named_parameters())

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        trained = []
        for client in range(len(self.setting.data)):
            with torch.no_grad():
                self.model.load_state_dict(self.network(client))
            self.fit(client, number)
            trained.append(copied(self.model, ""))
        for client, end in enumerate(trained):
            self.step(client, end)

    def fit(self, client: int, round: int) -> None:
        """Train the generated model on a client's data."""
        inputs, labels = self.setting.data[client]
        optimizer = torch.optim.SGD(self.model.parameters(), **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            scores = self.model["head"](self.model["encoder"](inputs[batch]))
            loss = F.cross_entropy(scores, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def step(self, client: int, trained: State) -> None:
        """A step along J^T (theta_i - theta~_i)."""
        theta = self.network(client)
        changes = [(generated - trained[name]).detach() for name, generated in theta.items()]
        self.optimizer.zero_grad()
        torch.autograd.backward(list(theta.values()), changes)
        nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.optimizer.step()
