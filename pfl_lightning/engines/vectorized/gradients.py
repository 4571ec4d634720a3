"""Unscaling and clipping of stacked gradients, for each client separately."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["LossScaling", "clip_per_client"]

Tensors = Mapping[str, Tensor]


class LossScaling:
    """Loss scales of many clients; each follows its client's gradients as ``GradScaler`` does.

    Args:
        scaler: A new scaler, whose settings all clients start with.
        count: Number of clients, K.
        device: Where they train.
    """

    def __init__(self, scaler: torch.amp.GradScaler, count: int, device: torch.device) -> None:
        self.scales = torch.full((count,), scaler.get_scale(), device=device)
        self._good_steps = torch.zeros(count, dtype=torch.int32, device=device)
        self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self._interval = scaler.get_growth_interval()

    def narrow(self, count: int) -> None:
        """Go on with the first clients."""
        self.scales, self._good_steps = self.scales[:count], self._good_steps[:count]

    @torch.no_grad()
    def unscale(self, gradients: Tensors) -> list[int]:
        """Divide the gradients (A, ...) by the scales, in place, and move the scales.

        Returns:
            Rows of the clients with a non-finite gradient, which must take no step.
        """
        inverse = self.scales.double().reciprocal().float()
        overflowed = torch.zeros_like(inverse, dtype=torch.bool)
        for gradient in gradients.values():
            flat = gradient.reshape(len(gradient), -1)  # a scalar parameter's are (A,)
            largest = torch.linalg.vector_norm(flat, ord=torch.inf, dim=1)  # NaN where there is one
            overflowed |= ~torch.isfinite(largest)
        for gradient in gradients.values():
            gradient.mul_(_broadcast(inverse, gradient))
        self._update(overflowed)
        return [row for row, over in enumerate(overflowed.tolist()) if over]

    def _update(self, overflowed: Tensor) -> None:
        steps = torch.where(overflowed, 0, self._good_steps + 1)
        grown = steps == self._interval
        larger = self.scales * self._growth
        self.scales = torch.where(
            overflowed,
            self.scales * self._backoff,
            torch.where(grown & torch.isfinite(larger), larger, self.scales),
        )
        self._good_steps = torch.where(grown, 0, steps)


@torch.no_grad()
def clip_per_client(gradients: Tensors, limit: float, algorithm: str) -> None:
    """Clip every client's gradients in place, like ``nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` for one.

    Args:
        gradients: Gradients of A clients by name, (A, ...).
        limit: Largest norm of a client's gradient, or largest absolute value of its entries.
        algorithm: ``"norm"`` or ``"value"``.

    Example:
        >>> import torch
        >>> from pfl_lightning.engines.vectorized.gradients import clip_per_client
        >>> gradients = {"weight": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}  # two clients, of norms 5 and 0.5
        >>> clip_per_client(gradients, limit=1.0, algorithm="norm")
        >>> gradients["weight"]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    if algorithm == "value":
        for gradient in gradients.values():
            gradient.clamp_(-limit, limit)
        return
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients.values()])
    scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(_broadcast(scale, gradient))


def _broadcast(values: Tensor, gradient: Tensor) -> Tensor:
    """Values of the clients (A,), reshaped to be multiplied with a gradient (A, ...)."""
    return values.view(-1, *[1] * (gradient.ndim - 1)).to(gradient.dtype)
