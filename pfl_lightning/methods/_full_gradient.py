"""Gradient of the loss on all of a client's training samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import State


@torch.enable_grad()
def full_gradient(client: FederatedClient, params: State, data: FitData) -> dict[str, Tensor]:
    """Gradient of the mean cross entropy of all training samples, in evaluation mode: nothing moves, or is drawn.

    Weight decay is part of the steps and not of this gradient. It is zero for parameters that the scores do not use.

    Args:
        client: Encoder and head.
        params: Parameters by name, at which it is taken.
        data: The client's data.
    """
    inputs, labels = data.tensors()
    at = {name: x.clone().requires_grad_() for name, x in params.items()}
    modes = {module: module.training for module in client.modules()}
    client.eval()
    gradients = {name: at_least_single(torch.zeros_like(x)) for name, x in at.items()}
    size = data.eval_batch_size
    for piece, own in zip(inputs.split(size), labels.split(size), strict=True):
        with data.forward_context():
            scores = functional_call(client, at, (data.convert_input(piece),))
            loss = F.cross_entropy(scores, own, reduction="sum")  # divided below: a share of it is lost in float16
        parts = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
        for name, part in zip(at, parts, strict=True):
            gradients[name] += part
    for module, mode in modes.items():
        module.training = mode
    return {name: (total / len(labels)).to(params[name]) for name, total in gradients.items()}
