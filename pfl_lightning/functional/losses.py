"""Terms of losses.

All are pure functions of tensors, without data-dependent shapes, so that `torch.func` can differentiate and vectorize
them over clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.functional.numerics import at_least_single, check_tensor, product, safe_sqrt


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
    check_tensor("features", features, ("N", "d"))
    check_tensor("labels", labels, (len(features),), "integers")
    check_tensor("prototypes", prototypes, ("C", features.shape[1]))
    if present is not None:
        check_tensor("present", present, (len(prototypes),), "bool")
    if norm not in ("mse", "l2"):
        raise ValueError(f"norm must be 'mse' (FedPAC) or 'l2' (DC-PFL), got {norm!r}")
    difference = at_least_single(features) - prototypes[labels]
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
    check_tensor("scores", scores, ("N", "C"))
    check_tensor("labels", labels, (len(scores),), "integers")
    if class_counts.shape != scores.shape[1:] or class_counts.dtype == torch.bool:
        raise ValueError(f"class_counts must be {scores.shape[1]} numbers, got {class_counts}")
    scores = at_least_single(scores)
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
        ValueError: if names, number or shapes differ, one alone is a mapping, or there are no tensors.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import proximal_term
        >>> local, received = {"weight": torch.tensor([4.0, 6.0])}, {"weight": torch.tensor([1.0, 2.0])}
        >>> proximal_term(local, received)  # 3^2 + 4^2
        tensor(25.)
        >>> proximal_term(local, received, squared=False)
        tensor(5.)
    """
    own, other = _by_name(params), _by_name(reference)
    shapes, expected = ({name: tensor.shape for name, tensor in one.items()} for one in (own, other))
    if shapes != expected or not own:
        raise ValueError(
            "params and reference must have the same names (or number) and shapes, and at least one tensor; not in "
            f"both are {sorted(shapes.items() ^ expected.items(), key=str)}"
        )
    total = square_term(list(own.values()), [other[name] for name in own])
    return total if squared else safe_sqrt(total)


def _by_name(tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> dict[Any, Tensor]:
    return dict(tensors) if isinstance(tensors, Mapping) else dict(enumerate(tensors))


def kl_divergence(target: Tensor, scores: Tensor) -> Tensor:
    """KL(p || q) of one network's probabilities p from another's q, a sum over classes and a mean over samples.

    Computed in single precision at least. Gradients flow to both; detach what is a target.

    Args:
        target: (N, C) scores whose softmax is p.
        scores: (N, C) scores whose softmax is q.

    Returns:
        A scalar, at least 0.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import kl_divergence
        >>> certain, even = torch.tensor([[100.0, 0.0]]), torch.zeros(1, 2)
        >>> kl_divergence(certain, even), kl_divergence(even, even)  # ln 2, and 0
        (tensor(0.6931), tensor(0.))
    """
    log_p, log_q = (at_least_single(found).log_softmax(dim=1) for found in (target, scores))
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()  # torch.nn.functional.kl_div has no rule for vmap


def maximum_mean_discrepancy(first: Tensor, second: Tensor, widths: Sequence[float] | None = None) -> Tensor:
    """How far two sets of features lie apart: the squared distance of their means under Gaussian kernels.

    k(a, b) is the sum over widths w of exp(-||a - b||^2 / w). Computed in single precision at least. Gradients flow to
    both; detach what is a target.

    Args:
        first: (N, d) features.
        second: (M, d) features.
        widths: The widths w; ``None`` takes 1/4, 1/2, 1, 2 and 4 times the mean of ||a - b||^2 over all pairs of both
            sets, without gradient (FedPHP's published code).

    Returns:
        A scalar: mean of k in the first set, plus that in the second, minus twice that between both; at least 0.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.losses import maximum_mean_discrepancy
        >>> zero, two = torch.zeros(1, 1), torch.full((1, 1), 2.0)
        >>> maximum_mean_discrepancy(zero, two, widths=[4.0])  # 1 + 1 - 2 exp(-4 / 4)
        tensor(1.2642)
        >>> maximum_mean_discrepancy(zero, zero, widths=[4.0])
        tensor(0.)
    """
    both = at_least_single(torch.cat([first, second]))
    both = both - both.detach().mean(dim=0)  # the same distances, of smaller numbers
    norms = both.square().sum(dim=1)
    squares = (norms[:, None] + norms - 2 * product(both, both.T)).clamp(min=0)
    if widths is None:
        mean = squares.detach().sum() / (len(both) * (len(both) - 1)) + 1e-8
        bands = [mean * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    else:
        bands = [squares.new_tensor(width) for width in widths]
    kernel = torch.stack([torch.exp(-squares / band) for band in bands]).sum(dim=0)
    count = len(first)
    within = kernel[:count, :count].mean() + kernel[count:, count:].mean()
    return within - 2 * kernel[:count, count:].mean()


def square_term(params: Sequence[Tensor], reference: Sequence[Tensor] | None = None) -> Tensor:
    """Sum of ||p - r||^2 over the tensors, whose gradient in a parameter p is 2 (p - r).

    A step of a small model takes little time, and ordinary autograd would add a chain of kernels for every tensor to
    it, forward and back.

    Args:
        params: p, at least one.
        reference: r, of the same shapes; ``None`` for zero, which leaves the squared norm.

    Returns:
        A scalar, under autocast in single precision.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.losses import square_term
        >>> weight = torch.tensor([4.0, 6.0], requires_grad=True)
        >>> term = square_term([weight], [torch.tensor([1.0, 2.0])])
        >>> term.item(), torch.autograd.grad(term, weight)  # 3^2 + 4^2
        (25.0, (tensor([6., 8.]),))
        >>> square_term([weight]).item()
        52.0
    """
    return cast(Tensor, _Squares.apply(len(params), *params, *(reference or ())))  # type: ignore[no-untyped-call]


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


class _Squares(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Tensor:
        """The term, of so many parameters and, unless they are zero, as many references."""
        params, targets = tensors[:count], tensors[count:]
        if not targets:
            return _total([parameter.square().sum() for parameter in params])
        # mse_loss with "sum" is ||p - r||^2; autocast runs it in single precision
        return _total([F.mse_loss(*pair, reduction="sum") for pair in zip(params, targets, strict=True)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the tensors, which exist anyway, and not their differences."""
        ctx.count = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """2 (p - r) for parameters, and its opposite for references that want one."""
        tensors, count, needed = ctx.saved_tensors, ctx.count, ctx.needs_input_grad[1:]
        scale = 2 * gradient
        if len(tensors) == count:
            return (None, *(own * scale if wanted else None for own, wanted in zip(tensors, needed, strict=True)))
        others = (*tensors[count:], *tensors[:count])
        triples = zip(tensors, others, needed, strict=True)
        return (None, *((own - other) * scale if wanted else None for own, other, wanted in triples))


def linear_term(params: Mapping[str, Tensor], reference: Mapping[str, Tensor], slopes: Mapping[str, Tensor]) -> Tensor:
    """<s, p - r>, whose gradient in the parameters p is s: it moves every step by s.

    The backward pass does no more than that, where ordinary autograd would go back through difference, product and sum
    of every tensor.

    Args:
        params: p, by name; further names are ignored.
        reference: r, of the names of the slopes, without gradient.
        slopes: s, without gradient.

    Returns:
        A scalar.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.losses import linear_term
        >>> weight = torch.tensor([4.0, 6.0], requires_grad=True)
        >>> term = linear_term({"weight": weight}, {"weight": torch.ones(2)}, {"weight": torch.tensor([0.5, 2.0])})
        >>> term.item(), torch.autograd.grad(term, weight)  # 0.5 * 3 + 2 * 5
        (11.5, (tensor([0.5000, 2.0000]),))
    """
    at, start = [params[name] for name in slopes], [reference[name] for name in slopes]
    return cast(Tensor, _LinearTerm.apply(*at, *start, *slopes.values()))  # type: ignore[no-untyped-call]


class _LinearTerm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        """The term, of as many parameters, references and slopes."""
        count = len(tensors) // 3
        triples = zip(tensors[:count], tensors[count : 2 * count], tensors[2 * count :], strict=True)
        return torch.stack([(slope * (at - start)).sum() for at, start, slope in triples]).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the slopes."""
        ctx.save_for_backward(*inputs[2 * len(inputs) // 3 :])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The slopes, as the parameters' gradients."""
        slopes = ctx.saved_tensors
        return (*(slope * gradient for slope in slopes), *[None] * (2 * len(slopes)))
