"""Supervised contrastive loss and, without labels, NT-Xent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import at_least_single, check_tensor, product, unit_rows


def supervised_contrastive_loss(
    features: Tensor,
    labels: Tensor | None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    normalize: bool = True,
    present: Tensor | None = None,
) -> Tensor:
    """Supervised contrastive loss (Khosla et al. 2020, eq. 2, L_out), or NT-Xent where there are no labels.

    It pulls views of the same class together and pushes all others apart.

    All views of all samples are anchors and contrast. With z_i the M = N V views, P(i) the other views of i's class
    and A(i) all other views, an anchor contributes

        -1 / |P(i)|  sum_{p in P(i)}  log( exp(z_i z_p / t) / sum_{a in A(i)} exp(z_i z_a / t) ),

    and zero, in value and gradient, where P(i) is empty. Without labels the positives are the other views of the same
    sample: NT-Xent (Chen et al. 2020). FedClassAvg takes two views and labels; DualFed one view and labels (eq. 7).

    Computed in single precision at least, also under autocast, so that half-precision features neither overflow nor
    lose what is divided by a small temperature.

    Args:
        features: (N, d), one view of each sample, or (N, V, d), V views.
        labels: (N,) integer class of each sample; None for NT-Xent, which needs V >= 2.
        temperature: t, finite and positive.
        base_temperature: the loss is multiplied by temperature / base_temperature, as in the code published with the
            paper (0.07 there); None does not scale.
        normalize: divide features by their L2 norm. A zero vector stays zero and gets no gradient.
        present: (N,) bool, False for samples that are left out, as anchors and as contrast: the loss is that of the
            other ones alone, without a shape that depends on data. Their features may be anything, NaN included, and
            get no gradient. None: every sample is present.

    Returns:
        A scalar, in single precision for half-precision features. The mean is over all M anchors that are present, also
        those without positives, so that the weight of a sample does not depend on which others are in its batch; zero
        for an empty batch and for a single view, which has no contrast.

    Raises:
        ValueError: if shapes do not fit together, features are not floating point, labels are not integers, present is
            not boolean, there is neither a label nor a second view, or a temperature is not finite and positive.

    Example:
        Two classes with orthogonal features: every anchor has one positive of similarity 1 and two negatives of
        similarity 0, so that the loss is -log(e / (e + 2)).

        >>> import torch
        >>> from pfl_lightning.functional import supervised_contrastive_loss
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> supervised_contrastive_loss(features, torch.tensor([0, 0, 1, 1]), temperature=1.0)
        tensor(0.5514)

        NT-Xent of two samples with two views each has the same positives here:

        >>> supervised_contrastive_loss(features.view(2, 2, 2), None, temperature=1.0)
        tensor(0.5514)
    """
    _check_contrastive_inputs(features, labels, present)
    scale = _temperature_scale(temperature, base_temperature)
    samples, views = features.shape[0], features.shape[1] if features.ndim == 3 else 1
    groups = torch.arange(samples, device=features.device) if labels is None else labels
    groups = groups.unsqueeze(1).expand(samples, views).reshape(-1)
    flat = at_least_single(features.reshape(-1, features.shape[-1]))
    left_out = torch.eye(
        samples * views, dtype=torch.bool, device=features.device
    )  # a view is not a negative of itself
    anchors: Tensor | int = max(samples * views, 1)
    if present is not None:
        there = present.unsqueeze(1).expand(samples, views).reshape(-1)
        # Selected, not multiplied by zero: NaN times zero is NaN, and so would be the gradient.
        flat = torch.where(there.unsqueeze(1), flat, 0.0)
        left_out = left_out | ~(there.unsqueeze(1) & there.unsqueeze(0))
        anchors = there.sum().clamp(min=1)
    positives = (groups.unsqueeze(1) == groups.unsqueeze(0)) & ~left_out
    if normalize:
        flat = unit_rows(flat)
    similarities = product(flat, flat.T) / temperature
    # The lowest finite number and not -inf, which is NaN in the gradient of an anchor without any contrast.
    log_shares = similarities.masked_fill(left_out, torch.finfo(flat.dtype).min).log_softmax(dim=1)
    chosen = torch.where(positives, log_shares, 0.0).sum(dim=1)
    losses = -chosen / positives.sum(dim=1).clamp(min=1)
    return scale * losses.sum() / anchors


def _temperature_scale(temperature: float, base_temperature: float | None) -> float:
    for name, value in (("temperature", temperature), ("base_temperature", base_temperature)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and positive, got {value}")
    return 1.0 if base_temperature is None else temperature / base_temperature


def _check_contrastive_inputs(features: Tensor, labels: Tensor | None, present: Tensor | None) -> None:
    check_tensor("features", features, ("N", "d") if features.ndim == 2 else ("N", "V", "d"))
    if present is not None:
        check_tensor("present", present, (len(features),), "bool")
    if labels is None:
        if features.ndim == 2 or features.shape[1] < 2:
            raise ValueError(
                "without labels the positives of a view are the other views of its sample: expected features of shape "
                f"(N, V, d) with V >= 2, got {tuple(features.shape)}"
            )
    else:
        check_tensor("labels", labels, (len(features),), "integers")
