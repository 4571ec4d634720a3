"""How a fit's gradients are found: in one pass at given parameters, or from the steps of SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.checks import check_learning_rate
from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.inner_loop import evaluating
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
    gradients = {name: at_least_single(torch.zeros_like(x)) for name, x in at.items()}
    size = data.eval_batch_size
    with evaluating(client):
        for piece, own in zip(inputs.split(size), labels.split(size), strict=True):
            with data.forward_context():
                scores = functional_call(client, at, (data.convert_input(piece),))
                loss = F.cross_entropy(scores, own, reduction="sum")  # divided below: a share of it is lost in float16
            parts = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
            for name, part in zip(at, parts, strict=True):
                gradients[name] += part
    return {name: (total / len(labels)).to(params[name]) for name, total in gradients.items()}


def steps_in_gradients(num_steps: int, momentum: float) -> float:
    """a_K: how many gradients K steps of SGD with momentum add up to, sum_j (1 - mu^(K - j + 1)) / (1 - mu).

    The j-th gradient acts in step j and, by the momentum, in the K - j steps after it.

    Args:
        num_steps: K.
        momentum: mu, below 1.

    Example:
        >>> from pfl_lightning.methods._gradients import steps_in_gradients
        >>> steps_in_gradients(3, 0.0), steps_in_gradients(3, 0.5)  # 1.75 + 1.5 + 1
        (3.0, 4.25)
    """
    later = momentum * (1 - momentum**num_steps) / (1 - momentum)
    return (num_steps - later) / (1 - momentum)


def what_is_made(configured: Any) -> str:
    """What ``configure_optimizers`` returned, with all that the sum of the steps depends on beside the gradients.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods._gradients import what_is_made
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> what_is_made(torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True))
        'SGD with lr=0.1, momentum=0.9, nesterov=True'
    """
    if isinstance(configured, list | tuple) and len(configured) == 2 and configured[1] == []:  # no schedules
        configured = configured[0]
    if isinstance(configured, list | tuple) and len(configured) == 1:
        [configured] = configured
    if isinstance(configured, dict) and "lr_scheduler" not in configured:
        configured = configured["optimizer"]
    if not isinstance(configured, torch.optim.Optimizer):
        return "several optimizers, or one with a schedule"
    if type(configured) is not torch.optim.SGD:
        return type(configured).__name__
    kinds = []
    for group in configured.param_groups:
        further = [f"{name}={group[name]}" for name in ("dampening", "nesterov", "maximize") if group[name]]
        rates = f"lr={float(group['lr'])}", f"momentum={float(group['momentum'])}"
        kinds.append(f"SGD with {', '.join([*rates, *further])}")
    return " and ".join(dict.fromkeys(kinds))


def check_steps_of_sgd(client: FederatedClient, purpose: str, alternative: str) -> None:
    """Refuse rates, phases and optimizers of which the steps are not those of SGD at the method's lr and momentum.

    Args:
        client: Its one phase and what its ``configure_optimizers`` makes are looked at.
        purpose: What the method takes from the steps, such as ``"FedCM takes the mean of the gradients"``.
        alternative: What else the user may do, such as ``"use FedAvg"``.
    """
    check_learning_rate(f"lr ({purpose} from the steps, and divides by it)", client.lr, strict=True)
    if client.momentum >= 1:
        raise ConfigurationError(
            f"momentum must be below 1, got {client.momentum}: {purpose} from the steps of SGD; or {alternative}"
        )
    phases, name = client.phases(), type(client).__name__
    if len(phases) > 1:
        raise ConfigurationError(
            f"{purpose} from the steps of one phase, whose momentum continues, but {name} has {len(phases)}: define "
            f"one, or {alternative}"
        )
    trained = client.trained_names(phases[0])
    if not trained:
        return  # the engine refuses it
    for parameter_name, parameter in client.named_parameters():
        parameter.requires_grad_(parameter_name in trained)
    before, client.phase = client.phase, phases[0]
    made = what_is_made(client.configure_optimizers())
    client.phase = before
    expected = what_is_made(torch.optim.SGD(client.parameters(), lr=client.lr, momentum=client.momentum))
    if made != expected:
        raise ConfigurationError(
            f"{name} makes {made} (configure_optimizers and phases()), expected {expected}: {purpose} from its steps. "
            f"Pass lr and momentum to the method and no other option of the optimizer, or {alternative}"
        )
