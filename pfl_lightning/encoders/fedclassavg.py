"""The small AlexNet of FedClassAvg (ICPP 2022), section 4.1."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from pfl_lightning.encoders.convolutional import image_shape
from pfl_lightning.encoders.registry import register

# The paper says only that its AlexNet is made for small images; the widths are those of its published code.
CHANNELS = (64, 128, 256)
POOLED = 3  # pixels a side that the last pooling leaves


@register("small_alexnet")
class SmallAlexNet(nn.Module):
    """Three 3x3 convolutions with ReLU and max pooling, average pooling to 3x3, dropout, two linear layers.

    ReLU is between the linear layers, as in the paper's published code; its text has one linear layer behind the
    convolutions of each network (``hidden=None``). Convolutions have 64, 128 and 256 channels and are padded by one.

    Args:
        input_shape: (channels, height, width) of one sample.
        out_features: Units of the last linear layer, the features.
        dropout: Probability that one of the 256 x 3 x 3 values before the linear layers is dropped in training.
        pooling: ``halving`` pools 2x2 after each convolution while that leaves the 3x3 pixels of the last pooling
            (28x28 images: 14, 7, 3). ``published`` pools as the code of the paper does: the first with stride 1 and the
            second with stride 2, both padded by one, and none after the third; it takes about four times the work.
        hidden: Units of the first linear layer, which ReLU follows; ``None`` leaves both out.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import SmallAlexNet
        >>> SmallAlexNet(input_shape=(1, 28, 28))(torch.rand(2, 1, 28, 28)).shape
        torch.Size([2, 512])
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        out_features: int = 512,
        dropout: float = 0.5,
        pooling: Literal["halving", "published"] = "halving",
        hidden: int | None = 512,
    ) -> None:
        super().__init__()
        before, height, width = image_shape(input_shape, "SmallAlexNet")
        if out_features < 1:
            raise ValueError(f"out_features must be at least 1, got {out_features}")
        if hidden is not None and hidden < 1:
            raise ValueError(f"hidden must be at least 1, or None for a single linear layer, got {hidden}")
        if pooling not in ("halving", "published"):
            raise ValueError(f"the pooling of SmallAlexNet is 'halving' or 'published', got {pooling!r}")
        layers: list[nn.Module] = []
        for index, (filters, pool) in enumerate(zip(CHANNELS, _pools(pooling, min(height, width)))):
            # ReLU does not decrease, so it commutes with the maximum; after pooling there is less to rectify.
            layers += [nn.Conv2d(before if index == 0 else CHANNELS[index - 1], filters, 3, padding=1), pool, nn.ReLU()]
        # On a CPU, pooling and convolution of this layout take half the time; the values are the same up to rounding.
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        width = CHANNELS[-1] * POOLED**2
        first = [] if hidden is None else [nn.Linear(width, hidden), nn.ReLU()]
        last = nn.Linear(width if hidden is None else hidden, out_features)
        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(POOLED), nn.Flatten(), nn.Dropout(dropout), *first, last)
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.features(self.convolutions(x))
        return features


def _pools(pooling: str, size: int) -> list[nn.Module]:
    if pooling == "published":
        return [nn.MaxPool2d(2, stride=1, padding=1), nn.MaxPool2d(2, padding=1), nn.Identity()]
    pools: list[nn.Module] = []
    for _ in CHANNELS:
        fits = size // 2 >= POOLED
        pools.append(nn.MaxPool2d(2) if fits else nn.Identity())
        size = size // 2 if fits else size
    return pools
