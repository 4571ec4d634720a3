"""A small convolutional network for small images such as the 8x8 digits, and that of the FedAvg paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfl_lightning.encoders._shapes import after_convolution, image_shape, require_pixels
from pfl_lightning.encoders.registry import register


@register("fedavg_cnn", channels=(32, 64), kernel_size=5, out_features=512)
@register("small_cnn")
class SmallCNN(nn.Module):
    """Convolutions, padded so that the size stays, with 2x2 max pooling and ReLU, then one layer with ReLU.

    An 8x8 image with the two default convolutions leaves 32 x 2 x 2 = 128 values for the last layer. Registered as
    ``small_cnn`` (the defaults), and as ``fedavg_cnn``, the network of the FedAvg paper (McMahan et al., AISTATS 2017)
    for MNIST: 5x5 convolutions with 32 and 64 channels, and 512 features.

    Args:
        input_shape: (channels, height, width) of one sample.
        channels: Channels of each convolution.
        out_features: Units of the last layer, the features.
        kernel_size: Side of the convolutions' kernels in pixels, an odd number.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small, a width is below one or the kernel's side is even.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import SmallCNN
        >>> SmallCNN(input_shape=(1, 8, 8))(torch.rand(4, 1, 8, 8)).shape
        torch.Size([4, 64])
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        channels: Sequence[int] = (16, 32),
        out_features: int = 64,
        kernel_size: int = 3,
    ) -> None:
        super().__init__()
        before, height, width = image_shape(input_shape, "SmallCNN")
        if len(channels) == 0 or min(*channels, out_features) < 1:
            raise ValueError(
                "SmallCNN needs at least one convolution and positive widths, "
                f"got channels={tuple(channels)}, out_features={out_features}"
            )
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"the kernel_size of SmallCNN must be odd and positive, got {kernel_size}")
        padding = kernel_size // 2
        layers: list[nn.Module] = []
        for filters in channels:
            # ReLU does not decrease, so it commutes with the maximum; after pooling there is a quarter to rectify.
            layers += [nn.Conv2d(before, filters, kernel_size, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
            before = filters
            height, width = (after_convolution(size, kernel_size, padding) for size in (height, width))
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
