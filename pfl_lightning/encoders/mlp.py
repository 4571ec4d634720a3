"""A multilayer perceptron for samples of any shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from pfl_lightning.encoders.registry import register


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
        if len(input_shape) == 0 or min(input_shape) < 1:
            raise ValueError(f"MLP needs an input_shape of positive integers, got {tuple(input_shape)}")
        widths = [math.prod(input_shape), *hidden, out_features]
        if min(widths) < 1:
            raise ValueError(
                f"MLP layers need at least one unit, got hidden={tuple(hidden)}, out_features={out_features}"
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
