"""A network at other parameters than its own, and gradient steps inside a step (bi-level methods).

A method whose loss is taken at the end of a few gradient steps, or at a mixture of two networks, has parameters that no
module holds. Everything here is a pure function of tensors, so that the engines can vectorize it over clients.

Three things to know:

- Batch normalization changes its running statistics in every pass, which ``torch.func`` refuses where it
  differentiates. Passes of an objective therefore run on copies of the buffers, made inside the function that is
  differentiated (``own_buffers=False``, the default here). The one pass whose loss the step returns takes the network's
  own, so that running statistics move once a step.
- A buffer that the step changes afterwards (a mixing parameter, a personal model) enters the loss as a clone. Otherwise
  the backward pass finds another value than the forward pass had.
- Inner steps are detached from the parameters that they start from. Second derivatives are products with the Hessian,
  detached, too, computed by ``torch.func`` alone: ordinary autograd around ``vmap`` gives wrong ones where batch
  normalization trains (torch 2.15). First derivatives are ordinary autograd's outside of ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.functional.numerics import is_transformed

Params = Mapping[str, Tensor]
Objective = Callable[[Params], Tensor]


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Context manager in which a network is in evaluation mode; each layer then goes back to the mode that it had."""
    modes = {layer: layer.training for layer in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def output_at(network: nn.Module, params: Params, inputs: Tensor, *, own_buffers: bool = False) -> Tensor:
    """Output of a network at given parameters.

    Args:
        network: The network, with its mode of every layer.
        params: Parameters by name, and buffers, if others than the network's are to be used; what is not named is the
            network's own.
        inputs: Inputs of the network.
        own_buffers: Whether buffers that ``params`` does not name are the network's own, which the pass may change (in
            training, batch normalization does); otherwise they are copies.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.inner_loop import output_at
        >>> network = torch.nn.Linear(1, 1)
        >>> output_at(network, {"weight": torch.full((1, 1), 2.0), "bias": torch.ones(1)}, torch.full((1, 1), 3.0))
        tensor([[7.]])
    """
    state = dict(params)
    if not own_buffers:
        state = {name: buffer.clone() for name, buffer in network.named_buffers()} | state
    output: Tensor = functional_call(network, state, (inputs,))
    return output


def scores_at(network: Any, params: Params, inputs: Tensor, *, own_buffers: bool = False) -> Tensor:
    """Class scores (N, C) of an encoder and a head at given parameters.

    Args:
        network: What has the attributes ``encoder`` and ``head``: a client, or what its ``copy_network`` returns.
        params: Parameters by name (``"encoder.0.weight"``), as :func:`output_at` takes them.
        inputs: Inputs, (N, ...).
        own_buffers: See :func:`output_at`.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.inner_loop import scores_at
        >>> network = torch.nn.ModuleDict({"encoder": torch.nn.Tanh(), "head": torch.nn.Linear(1, 2)})
        >>> scores_at(network, {"head.weight": torch.zeros(2, 1), "head.bias": torch.ones(2)}, torch.zeros(3, 1)).shape
        torch.Size([3, 2])
    """
    features = output_at(network.encoder, _of_part("encoder.", params), inputs, own_buffers=own_buffers)
    return output_at(network.head, _of_part("head.", params), features, own_buffers=own_buffers)


def loss_and_gradients(objective: Objective, params: Params) -> tuple[Tensor, dict[str, Tensor]]:
    """Value of an objective and its gradients, both detached.

    Args:
        objective: From parameters by name to a scalar.
        params: Where; the tensors that are differentiated.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.inner_loop import loss_and_gradients
        >>> loss_and_gradients(lambda at: at["x"].square().sum(), {"x": torch.tensor([1.0, 3.0])})
        (tensor(10.), {'x': tensor([2., 6.])})
    """
    if is_transformed() or torch.is_inference_mode_enabled():
        return _transformed(objective, params)
    # The same numbers by ordinary autograd, which is quicker: torch.func always makes a graph of the gradients.
    with torch.enable_grad():
        at = {name: tensor.requires_grad_() for name, tensor in _detached(params).items()}
        value = objective(at)
    if not value.requires_grad:  # nothing of it depends on the parameters
        return value, {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    gradients = torch.autograd.grad(value, list(at.values()), materialize_grads=True)
    return value.detach(), dict(zip(at, gradients, strict=True))


def descend(
    objective: Objective, params: Params, *, steps: int, lr: float | Tensor, weight_decay: float = 0.0
) -> dict[str, Tensor]:
    """Parameters after plain gradient steps, x - lr (gradient + weight_decay x) each; detached.

    Args:
        objective: From parameters by name to a scalar.
        params: Where the steps start.
        steps: Number of steps.
        lr: Learning rate.
        weight_decay: Weight decay.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.inner_loop import descend
        >>> descend(lambda at: at["x"].square().sum(), {"x": torch.tensor([1.0, 3.0])}, steps=2, lr=0.25)
        {'x': tensor([0.2500, 0.7500])}
    """
    at = _detached(params)
    for _ in range(steps):
        _, gradients = loss_and_gradients(objective, at)
        at = {name: p - lr * (gradients[name] + weight_decay * p) for name, p in at.items()}
    return at


def hessian_product(objective: Objective, params: Params, vector: Params) -> dict[str, Tensor]:
    """Product of an objective's Hessian with a vector, detached.

    Args:
        objective: From parameters by name to a scalar.
        params: Where the second derivatives are taken.
        vector: The vector, by the names of ``params``.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.inner_loop import hessian_product
        >>> at, vector = {"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([1.0, 10.0])}
        >>> hessian_product(lambda at: at["x"].pow(3).sum(), at, vector)  # the Hessian is diag(6, 18)
        {'x': tensor([  6., 180.])}
    """
    held = _detached(vector)

    def slope(at: Params) -> Tensor:
        gradients = torch.func.grad(objective)(dict(at))
        return torch.stack([(gradients[name] * along).sum() for name, along in held.items()]).sum()

    return _transformed(slope, params)[1]


def _transformed(objective: Objective, params: Params) -> tuple[Tensor, dict[str, Tensor]]:
    """:func:`loss_and_gradients` by ``torch.func``, which works inside of ``vmap``."""
    with torch.no_grad():  # which torch.func looks past: the gradients are there, and no graph of them
        gradients, value = torch.func.grad_and_value(objective)(_detached(params))
    return value.detach(), _detached(gradients)


def _of_part(prefix: str, params: Params) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}


def _detached(tensors: Params) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
