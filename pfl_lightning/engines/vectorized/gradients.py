"""What happens to the gradients of many clients before the step: unscaling and clipping, for each client alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["LossScaling", "clip_per_client"]

Tensors = Mapping[str, Tensor]


class LossScaling:
    """A scale for the loss of each client, which follows the client's own gradients as ``GradScaler`` does.

    Args:
        scaler: A fresh scaler, of which all start as copies.
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
            The clients, by row, that have a gradient that is not finite, and must take no step.
        """
        inverse = self.scales.double().reciprocal().float()
        overflowed = torch.zeros_like(inverse, dtype=torch.bool)
        for gradient in gradients.values():
            largest = torch.linalg.vector_norm(gradient.flatten(1), ord=torch.inf, dim=1)  # NaN where there is one
            overflowed |= ~torch.isfinite(largest)
        for gradient in gradients.values():
            gradient.mul_(_beside(inverse, gradient))
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
    """Clip every client's gradients in place, as ``nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` clip one's."""
    if algorithm == "value":
        for gradient in gradients.values():
            gradient.clamp_(-limit, limit)
        return
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()])
    scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(_beside(scale, gradient))


def _beside(values: Tensor, gradient: Tensor) -> Tensor:
    """A number of each client (A,), to be multiplied with a gradient (A, ...)."""
    return values.view(-1, *[1] * (gradient.ndim - 1)).to(gradient.dtype)
