"""Optimizers of the server, whose gradient is the step back from the clients' average to the server's weights.

Any torch optimizer may take their place. Those of Adaptive Federated Optimization (Reddi et al., ICLR 2021, Algorithm
2) have no correction of the bias, which torch's have, and begin at v = tau^2. With D = average - x, the paper's Delta:

    m = beta1 m + (1 - beta1) D,    x = x + lr m / (sqrt(v) + tau)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.checks import check_between, check_learning_rate, check_number

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"]


class FedAvgM(torch.optim.SGD):
    """v = momentum v + D, x = x + lr v (Hsu et al., 2019).

    Args:
        params: The server's weights.
        lr: Rate of the server; 1 takes over the average where there is no momentum.
        momentum: Momentum of the server.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1.0, momentum: float = 0.9) -> None:
        check_learning_rate("server lr", lr)
        check_number("server momentum", momentum)
        super().__init__(params, lr=lr, momentum=momentum)


class _Adaptive(Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float, beta1: float, tau: float, beta2: float = 0.0) -> None:
        check_learning_rate("server lr", lr)
        check_between("beta1", beta1, 0, 1)
        check_between("beta2", beta2, 0, 1)
        check_number("tau", tau, strict=True)
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau})

    def second(self, v: Tensor, squared: Tensor, beta2: float) -> Tensor:
        """The next v, given D^2."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step all parameters that have a gradient, which is -D."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient, tau = self.state[parameter], parameter.grad, group["tau"]
                if not state:
                    state |= {"m": torch.zeros_like(parameter), "v": torch.full_like(parameter, tau**2)}
                state["m"] = group["beta1"] * state["m"] + (1 - group["beta1"]) * gradient
                state["v"] = self.second(state["v"], gradient.square(), group["beta2"])
                parameter -= group["lr"] * state["m"] / (state["v"].sqrt() + tau)


class FedAdam(_Adaptive):
    """v = beta2 v + (1 - beta2) D^2.

    Args:
        params: The server's weights.
        lr: Rate of the server.
        beta1: Share of m that is kept.
        beta2: Share of v that is kept.
        tau: How adaptive the steps are: the smaller, the more; v begins at tau^2.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        super().__init__(params, lr, beta1, tau, beta2)

    def second(self, v: Tensor, squared: Tensor, beta2: float) -> Tensor:
        """The next v, given D^2."""
        return beta2 * v + (1 - beta2) * squared


class FedYogi(FedAdam):
    """v = v - (1 - beta2) D^2 sign(v - D^2), which forgets large changes more slowly than FedAdam's.

    Args:
        params: The server's weights.
        lr: Rate of the server.
        beta1: Share of m that is kept.
        beta2: v moves by (1 - beta2) D^2.
        tau: How adaptive the steps are: the smaller, the more; v begins at tau^2.
    """

    def second(self, v: Tensor, squared: Tensor, beta2: float) -> Tensor:
        """The next v, given D^2."""
        return v - (1 - beta2) * squared * torch.sign(v - squared)


class FedAdagrad(_Adaptive):
    """v = v + D^2.

    Args:
        params: The server's weights.
        lr: Rate of the server.
        beta1: Share of m that is kept; 0 for the usual Adagrad, which has no momentum.
        tau: How adaptive the steps are: the smaller, the more; v begins at tau^2.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(params, lr, beta1, tau)

    def second(self, v: Tensor, squared: Tensor, beta2: float) -> Tensor:
        """The next v, given D^2."""
        return v + squared
