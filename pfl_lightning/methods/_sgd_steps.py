"""Steps of SGD as sums of gradients: how many they add up to, and which optimizers take other steps."""

from __future__ import annotations

from typing import Any

import torch

from pfl_lightning.checks import check_learning_rate, check_number
from pfl_lightning.errors import ConfigurationError

__all__ = ["check_plain_sgd", "steps_in_gradients", "what_is_made"]


def steps_in_gradients(num_steps: int, momentum: float) -> float:
    """a_K: how many gradients K steps of SGD with momentum add up to, sum_j (1 - mu^(K - j + 1)) / (1 - mu).

    The j-th gradient acts in step j and, by the momentum, in the K - j steps after it.

    Args:
        num_steps: K.
        momentum: mu, below 1.

    Example:
        >>> from pfl_lightning.methods._sgd_steps import steps_in_gradients
        >>> steps_in_gradients(3, 0.0), steps_in_gradients(3, 0.5)  # 1.75 + 1.5 + 1
        (3.0, 4.25)
    """
    later = momentum * (1 - momentum**num_steps) / (1 - momentum)
    return (num_steps - later) / (1 - momentum)


def what_is_made(configured: Any) -> str:
    """What ``configure_optimizers`` returned, with all that the sum of the steps depends on beside the gradients.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods._sgd_steps import what_is_made
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


def check_plain_sgd(lr: float, momentum: float, replaced: dict[str, object]) -> None:
    """Refuse what makes the sum of a fit's steps no multiple of a mean of gradients."""
    check_learning_rate('lr (eta_l, by which control="steps" divides)', lr, strict=True)
    check_number("momentum", momentum)
    if momentum >= 1:
        raise ConfigurationError(f'momentum must be below 1 with control="steps", got {momentum}')
    for name, value in replaced.items():
        if value is not None:
            raise ConfigurationError(
                f'control="steps" takes the mean of the gradients from the steps of SGD at a constant rate, and '
                f'{name} was given: leave it out, or use control="gradient", which takes one more pass over the data'
            )
