"""Loss terms that clients add to their cross entropy.

All are pure functions of tensors, without data-dependent shapes, so that `torch.func` can differentiate and vectorize
them over clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.functional.numerics import safe_sqrt
from pfl_lightning.functional.square_term import square_term


def alignment_loss(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor | None = None,
    norm: Literal["mse", "l2"] = "mse",
) -> Tensor:
    """Distance of features to the prototype of their class, averaged over the batch.

    Computed in single precision at least, so that half-precision features do not overflow when squared.

    Args:
        features: (N, d) features f(x).
        labels: (N,) integer class of each sample, in 0..C-1.
        prototypes: (C, d) one prototype c_y a class.
        present: (C,) bool, False for classes without a prototype; their rows may hold anything, NaN included, and
            their samples contribute zero to value and gradient. None: every class has a prototype.
        norm: "mse" for the mean of (1/d) ||f(x) - c_y||^2 (FedPAC, eq. 3); "l2" for the mean of ||f(x) - c_y||_2
            (DC-PFL, eq. 3), whose gradient is taken as zero at distance zero.

    Returns:
        A scalar. The mean is over all N samples, also those whose class is not present, so that the weight of a sample
        does not depend on which other classes are known; zero for an empty batch.

    Raises:
        ValueError: if shapes do not fit together, labels are not integers, or `norm` is unknown.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import alignment_loss
        >>> features, labels = torch.tensor([[3.0, 4.0]]), torch.tensor([0])
        >>> prototypes = torch.tensor([[0.0, 0.0], [float("nan"), float("nan")]])
        >>> alignment_loss(features, labels, prototypes)  # (3^2 + 4^2) / 2
        tensor(12.5000)
        >>> alignment_loss(features, labels, prototypes, norm="l2")
        tensor(5.)

        A sample of a class without a prototype contributes zero, but counts in the mean:

        >>> two, present = torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([True, False])
        >>> alignment_loss(two, torch.tensor([0, 1]), prototypes, present, norm="l2")
        tensor(2.5000)
    """
    _check_alignment_inputs(features, labels, prototypes, present)
    if norm not in ("mse", "l2"):
        raise ValueError(f"norm must be 'mse' (FedPAC) or 'l2' (DC-PFL), got {norm!r}")
    if features.dtype in (torch.float16, torch.bfloat16):
        features = features.float()
    difference = features - prototypes[labels]
    if present is not None:
        # Selected, not multiplied by zero: NaN times zero is NaN, and so would be the gradient.
        difference = torch.where(present[labels].unsqueeze(-1), difference, 0.0)
    squares = difference.square().sum(dim=-1)  # ||f(x) - c_y||^2, (N,)
    # FedPAC (3) without lambda, or DC-PFL (3)
    distances = squares / features.shape[-1] if norm == "mse" else safe_sqrt(squares)
    return distances.sum() / max(features.shape[0], 1)


def balanced_softmax_loss(scores: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """Cross entropy of scores + log(class counts), which undoes an imbalance of classes (Ren et al. 2020).

    Fed-RoD trains its generic head with it (Chen and Chao 2022). A class with no samples has log(0) = -inf: it
    has no share in the softmax, and its score may be anything and gets no gradient. Computed in single precision at
    least, also under autocast.

    Args:
        scores: (N, C) logits.
        labels: (N,) integer class of each sample, in 0..C-1.
        class_counts: (C,) samples of each class in the training set, >= 0; shares do as well, as a common factor
            changes nothing.

    Returns:
        A scalar, in single precision for half-precision scores. The mean is over all N samples; a sample of a class
        without count, for which the formula says infinity, contributes zero. Zero for an empty batch.

    Raises:
        ValueError: if shapes do not fit together, scores are not floating point, or labels are not integers.

    Example:
        With equal scores the probabilities are the class shares, here 3/4 and 1/4:

        >>> import torch
        >>> from pfl_lightning.functional import balanced_softmax_loss
        >>> scores, counts = torch.zeros(1, 2), torch.tensor([3, 1])
        >>> balanced_softmax_loss(scores, torch.tensor([0]), counts)  # -log(3/4)
        tensor(0.2877)
        >>> balanced_softmax_loss(scores, torch.tensor([1]), counts)  # -log(1/4)
        tensor(1.3863)
    """
    _check_balanced_inputs(scores, labels, class_counts)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    seen = class_counts > 0
    prior = torch.where(seen, class_counts, 1).to(scores.dtype).log()
    # The lowest finite number in place of -inf: the share is zero just as well, and the gradient is not NaN.
    adjusted = torch.where(seen, scores + prior, torch.finfo(scores.dtype).min)
    losses = F.cross_entropy(adjusted, labels.long(), reduction="none")
    return torch.where(seen[labels.long()], losses, 0.0).sum() / max(scores.shape[0], 1)


def proximal_term(
    params: Mapping[str, Tensor] | Iterable[Tensor],
    reference: Mapping[str, Tensor] | Iterable[Tensor],
    squared: bool = True,
) -> Tensor:
    """Distance of parameters to a reference, all tensors taken as one long vector.

    Args:
        params: parameters by name, or in order.
        reference: tensors of the same names (or in the same order) and shapes; usually without gradient.
        squared: True for sum ||p - r||^2, without a factor 1/2 (FedProx multiplies it by mu / 2); False for
            ||p - r||_2 (FedClassAvg, eq. 5), whose gradient is taken as zero where p equals r.

    Returns:
        A scalar.

    Raises:
        ValueError: if names, number or shapes differ, or there are no tensors.
        TypeError: if one is a mapping and the other is not.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import proximal_term
        >>> local, received = {"weight": torch.tensor([4.0, 6.0])}, {"weight": torch.tensor([1.0, 2.0])}
        >>> proximal_term(local, received)  # 3^2 + 4^2
        tensor(25.)
        >>> proximal_term(local, received, squared=False)
        tensor(5.)
    """
    pairs = _paired(params, reference)
    total = square_term([parameter for parameter, _ in pairs], [target for _, target in pairs])
    return total if squared else safe_sqrt(total)


def _check_alignment_inputs(features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor | None) -> None:
    if features.ndim != 2:
        raise ValueError(f"features must have shape (N, d), got {tuple(features.shape)}: flatten all but the batch")
    if labels.shape != features.shape[:1]:
        raise ValueError(f"labels must have shape ({features.shape[0]},), got {tuple(labels.shape)}")
    if labels.is_floating_point():
        raise ValueError(f"labels must be integer class indices, got {labels.dtype}")
    if prototypes.ndim != 2 or prototypes.shape[1] != features.shape[1]:
        raise ValueError(
            f"prototypes must have shape (C, {features.shape[1]}) as the features do, got {tuple(prototypes.shape)}"
        )
    if present is not None and (present.shape != prototypes.shape[:1] or present.dtype != torch.bool):
        raise ValueError(
            f"present must be a bool tensor of shape ({prototypes.shape[0]},), "
            f"got {present.dtype} of shape {tuple(present.shape)}"
        )


def _check_balanced_inputs(scores: Tensor, labels: Tensor, class_counts: Tensor) -> None:
    if scores.ndim != 2 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be floating point of shape (N, C), got {scores.dtype} of shape {tuple(scores.shape)}"
        )
    if labels.shape != scores.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels must be integer class indices of shape ({scores.shape[0]},), "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if class_counts.shape != scores.shape[1:] or class_counts.dtype == torch.bool:
        raise ValueError(
            f"class_counts must be numbers of shape ({scores.shape[1]},), one a class, "
            f"got {class_counts.dtype} of shape {tuple(class_counts.shape)}"
        )


def _paired(
    params: Mapping[str, Tensor] | Iterable[Tensor], reference: Mapping[str, Tensor] | Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    if isinstance(params, Mapping) != isinstance(reference, Mapping):
        raise TypeError(
            "params and reference must both be mappings or both be sequences, "
            f"got {type(params).__name__} and {type(reference).__name__}"
        )
    first, second = _by_name(params), _by_name(reference)
    if first.keys() != second.keys():
        raise ValueError(
            "params and reference must have the same names: "
            f"only in params {[k for k in first if k not in second]}, "
            f"only in reference {[k for k in second if k not in first]}"
        )
    if not first:
        raise ValueError("expected at least one parameter, got none: does the name pattern match anything?")
    for name in first:
        if first[name].shape != second[name].shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(first[name].shape)}, "
                f"its reference {tuple(second[name].shape)}: both must be the same"
            )
    return [(first[name], second[name]) for name in first]


def _by_name(tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str | int, Tensor]:
    if isinstance(tensors, Mapping):
        return {name: tensors[name] for name in tensors}
    return dict(enumerate(tensors))
