"""A small convolutional network for small images such as the 8x8 digits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfl_lightning.encoders._shapes import after_convolution, image_shape, require_pixels
from pfl_lightning.encoders.registry import register


@register("small_cnn")
class SmallCNN(nn.Module):
    """3x3 convolutions (padded by one) with 2x2 max pooling and ReLU, then one layer with ReLU.

    An 8x8 image with the two default convolutions leaves 32 x 2 x 2 = 128 values for the last layer.

    Args:
        input_shape: (channels, height, width) of one sample.
        channels: Channels of each convolution.
        out_features: Units of the last layer, the features.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small or a width is below one.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import SmallCNN
        >>> SmallCNN(input_shape=(1, 8, 8))(torch.rand(4, 1, 8, 8)).shape
        torch.Size([4, 64])
    """

    def __init__(
        self, input_shape: tuple[int, int, int], channels: Sequence[int] = (16, 32), out_features: int = 64
    ) -> None:
        super().__init__()
        before, height, width = image_shape(input_shape, "SmallCNN")
        if len(channels) == 0 or min(*channels, out_features) < 1:
            raise ValueError(
                "SmallCNN needs at least one convolution and positive widths, "
                f"got channels={tuple(channels)}, out_features={out_features}"
            )
        layers: list[nn.Module] = []
        for filters in channels:
            # ReLU does not decrease, so it commutes with the maximum; after pooling there is a quarter to rectify.
            layers += [nn.Conv2d(before, filters, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
            before = filters
            height, width = after_convolution(height, 3, 1), after_convolution(width, 3, 1)
        remedy = "use larger images or fewer convolutions"
        require_pixels(height, width, f"SmallCNN with {len(channels)} convolutions", input_shape, remedy)
        # On a CPU, pooling and convolution of this layout take half the time; the values are the same up to rounding.
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(before * height * width, out_features), nn.ReLU())
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.features(self.convolutions(x))
        return features
