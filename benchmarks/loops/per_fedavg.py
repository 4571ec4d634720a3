"""A round of Per-FedAvg (Fallah et al., NeurIPS 2020) of first order in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Loop, Setting, State, copied, mean_of

ALPHA = 0.01


class PerFedAvg(Loop):
    """All of the model is averaged, and each client counts the same."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        encoder = setting.make_encoder()
        head = nn.Linear(int(encoder.out_features), setting.classes)
        self.model = nn.ModuleDict({"encoder": encoder, "head": head}).to(setting.dtype)

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        trained = list[State]()
        for client in range(len(self.setting.data)):
            self.model.load_state_dict(self.server)
            self.fit(client, number)
            trained.append(copied(self.model, ""))
        self.server = mean_of(trained, [1] * len(trained))

    def fit(self, client: int, round: int) -> None:
        """Steps w - beta grad f(w~; D') with w~ = w - alpha grad f(w; D), where D and D' are halves of a batch."""
        inputs, labels = self.setting.data[client]
        parameters = list(self.model.parameters())
        optimizer = torch.optim.SGD(parameters, **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            if len(batch) < 2:
                continue
            (x, other_x), (y, other_y) = inputs[batch].tensor_split(2), labels[batch].tensor_split(2)
            gradients = torch.autograd.grad(self.loss(x, y), parameters)
            start = [parameter.detach().clone() for parameter in parameters]  # w
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=ALPHA)  # w~
            optimizer.zero_grad()
            self.loss(other_x, other_y).backward()
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            optimizer.step()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """F at the parameters that the model has now."""
        return F.cross_entropy(self.model["head"](self.model["encoder"](inputs)), labels)
