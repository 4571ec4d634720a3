"""Base of self-supervised objectives: losses of two views of a batch, without labels."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.numerics import at_least_single, without_autocast

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext
    from pfl_lightning.fit.data import FitData


@dataclass(frozen=True)
class ObjectiveOutput:
    """Output of an objective for a batch of B samples.

    Attributes:
        loss: The objective's loss, a scalar.
        encodings: Encodings z = f(x) of each view by the client's encoder, (B, d).
        projections: Projections of each view by the client's projector, (B, p), not normalized.
    """

    loss: Tensor
    encodings: tuple[Tensor, Tensor]
    projections: tuple[Tensor, Tensor]


class Objective(nn.Module):
    """Loss of two views of a batch, with the networks that it needs in addition to the encoder.

    The encoder is the client's and comes with every call; the objective holds no reference to it. All parameters of an
    objective train; a network that follows another one is made of buffers
    (:class:`~pfl_lightning.self_supervised.TargetNetwork`). State that is neither shared nor personal lives in
    non-persistent buffers and is re-created in :meth:`before_fit`.

    ``forward`` is part of a client's ``training_step`` and, like it, a pure function of parameters, buffers and batch.

    Args:
        encoder: Network from inputs to features (N, d), with an attribute ``out_features`` (d); a target network is
            made as a copy of it.
        hidden: Width of the projector's hidden layers.
        out: Width of the projections, p.
    """

    shared: tuple[str, ...] = ("projector.*",)
    """Patterns of the objective's shared parameters and buffers; other persistent ones stay with the client."""

    projector: nn.Module

    def __init__(self, encoder: nn.Module, hidden: int = 2048, out: int = 256) -> None:
        super().__init__()
        check_at_least("hidden", hidden, 1)
        check_at_least("out", out, 1)
        self.in_features, self.hidden, self.out = cast(int, encoder.out_features), hidden, out

    @property
    def heads(self) -> Any:
        """Module ``lightly.models.modules.heads``."""
        return _lightly("lightly.models.modules.heads", type(self).__name__)

    @property
    def losses(self) -> Any:
        """Module ``lightly.loss``."""
        return _lightly("lightly.loss", type(self).__name__)

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse clients with too few samples; called before the first round.

        Args:
            samples: Number of training samples of each client that takes part.

        Raises:
            ConfigurationError: A client has too few samples; the message names it, their number, and a remedy.
        """

    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Hook at the start of a local fit, after the received state is loaded and torch's generators are seeded."""

    def forget(self) -> None:
        """Discard the client's state of earlier fits, so that the next fit starts as the first did."""

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """Loss of a batch, with its encodings and projections.

        Args:
            encoder: The client's encoder.
            first: First view of each sample, (B, ...).
            second: Second view of each sample, (B, ...).
        """
        raise NotImplementedError


def of_both_views(network: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a network for two views, in one pass: batch normalization sees both (SimCLR, SwAV).

    Example:
        >>> import torch
        >>> from pfl_lightning.self_supervised.objective import of_both_views
        >>> norm = torch.nn.BatchNorm1d(1, affine=False)
        >>> first, second = torch.zeros(2, 1), torch.full((2, 1), 2.0)
        >>> of_both_views(norm, first, second)[1].round(decimals=3).flatten().tolist()  # mean 1, deviation 1
        [1.0, 1.0]
    """
    one, other = network(joined(first, second)).chunk(2)
    return one, other


def joined(first: Any, second: Any) -> Any:
    """Both views of a batch as one batch: tensors, and dictionaries and tuples of them.

    Raises:
        ConfigurationError: A batch is something else.

    Example:
        >>> import torch
        >>> from pfl_lightning.self_supervised.objective import joined
        >>> joined({"x": torch.zeros(1), "name": ["a"]}, {"x": torch.ones(1), "name": ["a"]})
        {'x': tensor([0., 1.]), 'name': ['a', 'a']}
    """
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([first, second])
    if isinstance(first, Mapping):
        return {name: joined(value, second[name]) for name, value in first.items()}
    if isinstance(first, list) and not any(isinstance(value, Tensor) for value in first):
        return [*first, *second]
    if isinstance(first, tuple | list):
        return tuple(joined(*pair) for pair in zip(first, second, strict=True))
    if isinstance(first, Tensor | int | float | str | bool | None):
        return first  # of the batch as a whole
    raise ConfigurationError(
        "this objective passes both views of a batch through the encoder together, but a batch has a "
        f"{type(first).__name__}, and two of these cannot be joined: use an objective that takes each view separately "
        "(byol, simsiam, mocov2, smog, or SimCLR with separate_views=True)"
    )


def of_each_view(network: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a network for two views, one after the other: batch normalization sees one at a time.

    The published code of BYOL, SimSiam and MoCo does the same. No information about the other view leaks through the
    statistics of a shared batch, and a loss in one direction has no gradient for the target view.

    Example:
        >>> import torch
        >>> from pfl_lightning.self_supervised.objective import of_each_view
        >>> norm = torch.nn.BatchNorm1d(1, affine=False)
        >>> first, second = torch.zeros(2, 1), torch.full((2, 1), 2.0)
        >>> [output.flatten().tolist() for output in of_each_view(norm, first, second)]  # each has its own mean
        [[0.0, 0.0], [0.0, 0.0]]
    """
    return network(first), network(second)


def in_single_precision(loss: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Loss computed in single precision at least, also under autocast: its exponentials overflow in half precision."""
    with without_autocast(tensors[0].device):
        return loss(*(at_least_single(tensor) for tensor in tensors))


def features_of(encoder: nn.Module, data: FitData) -> Tensor:
    """Features (n, d) of all of a client's samples; the layers of a user's module read the items themselves."""
    own: Callable[[FitData], Tensor] | None = getattr(encoder, "features_of", None)
    return data.features(encoder)[0] if own is None else own(data)


def _lightly(module: str, objective: str) -> Any:
    os.environ.setdefault("LIGHTLY_DID_VERSION_CHECK", "True")  # else versions before 1.6 ask for it over the network
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{objective} needs the package lightly, which cannot be imported ({error}); "
            "install it: pip install 'pfl-lightning[ssl]'"
        ) from error
