"""Stacks of linear layers: a multilayer perceptron, and the projector behind an encoder of DualFed (ACM MM 2024)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from pfl_lightning.encoders.assignment import EncoderFactory
from pfl_lightning.encoders.registry import build_encoder, register


@register("mlp")
class MLP(nn.Module):
    """Linear layers with ReLU on the flattened sample.

    Args:
        input_shape: Shape of one sample, of any number of dimensions.
        hidden: Units of the layers before the last; may be empty.
        out_features: Units of the last layer, the features.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If a size is below one.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import MLP
        >>> MLP(input_shape=(30,), hidden=(64, 32), out_features=16)(torch.rand(4, 30)).shape
        torch.Size([4, 16])
    """

    def __init__(self, input_shape: tuple[int, ...], hidden: Sequence[int] = (128,), out_features: int = 64) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden, out_features]
        if len(input_shape) == 0 or min(*input_shape, *widths) < 1:
            raise ValueError(
                f"MLP needs positive integers, got input_shape={tuple(input_shape)}, hidden={tuple(hidden)}, "
                f"out_features={out_features}"
            )
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map samples (N, *input_shape) to features (N, out_features)."""
        features: Tensor = self.layers(x)
        return features


@register("resnet18_projector")
class WithProjector(nn.Module):
    """A network and a projector behind it, together one encoder: Linear - ReLU - BN - Linear - BN.

    Comparisons with DualFed are fair by it: every method has the layers that DualFed has. What a method shares, keeps
    or trains of its encoder (``encoder.*``) then includes the projector. DualFed has a projector of its own, between
    its two classifiers, and takes the plain encoder.

    Args:
        input_shape: Shape of one sample.
        encoder: Registered name of the network, or a factory that makes it from the shape of a sample.
        hidden: Width of the projector's hidden layers, H.
        depth: Number of its linear layers, D.
        batch_norm: Whether each of them is followed by batch normalization.

    Shape:
        (N, *input_shape) to (N, out_features), the width of the network's own features.

    Raises:
        ValueError: If a number is below one.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import WithProjector
        >>> encoder = WithProjector(input_shape=(1, 28, 28), encoder="small_cnn", hidden=32)
        >>> encoder(torch.rand(2, 1, 28, 28)).shape[1] == encoder.encoder.out_features
        True
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        encoder: str | EncoderFactory = "resnet18",
        hidden: int = 256,
        depth: int = 2,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        for name, number in (("hidden", hidden), ("depth", depth)):
            if number < 1:
                raise ValueError(f"{name} of WithProjector must be at least 1, got {number}")
        self.encoder = build_encoder(encoder, input_shape) if isinstance(encoder, str) else encoder(input_shape)
        self.out_features = cast(int, self.encoder.out_features)
        self.projector = make_projector(self.out_features, hidden, depth, batch_norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples (N, *input_shape) to projected features (N, out_features)."""
        features: Tensor = self.projector(self.encoder(x))
        return features


def make_projector(width: int, hidden: int, depth: int, batch_norm: bool) -> nn.Sequential:
    """Linear layers from ``width`` over ``hidden`` back to ``width``: Linear - ReLU - BN - ... - Linear - BN.

    Args:
        width: Width of the features, d; the projection has the same.
        hidden: Width of the hidden layers.
        depth: Number of linear layers.
        batch_norm: Whether there is batch normalization.
    """
    widths = [width, *([hidden] * (depth - 1)), width]
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(nn.Linear(widths[index], widths[index + 1]))
        if index < depth - 1:
            layers.append(nn.ReLU())
        if batch_norm:
            layers.append(nn.BatchNorm1d(widths[index + 1]))
    return nn.Sequential(*layers)
