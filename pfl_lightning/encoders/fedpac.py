"""The convolutional networks of FedPAC (ICLR 2023), section 6.1 and appendix B.1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfl_lightning.encoders._shapes import after_convolution, image_shape, require_pixels
from pfl_lightning.encoders.registry import register

CHANNELS = (16, 32, 64)
KERNELS = (5, 5, 3)
# The paper names no padding. Its published code pads the convolutions for 32 x 32 images by 0, 1 and 1, which leaves
# 64 x 3 x 3 values. The smaller network is described as the same without its last convolution and is padded alike.
PADDINGS = (0, 1, 1)


@register("fedpac_cnn")
class FedPACCNN(nn.Module):
    """FedPAC's encoder: two or three convolutions, then a layer of 128 units, all with LeakyReLU.

    Convolutions are 5x5 with 16 channels, 5x5 with 32 and (the third) 3x3 with 64, each followed by 2x2 max pooling.
    28x28 images with two convolutions leave 32 x 5 x 5 = 800 values for the last layer, 32x32 images with three leave
    64 x 3 x 3 = 576.

    Args:
        input_shape: (channels, height, width) of one sample.
        convolutions: 2 (the paper's network for EMNIST and Fashion-MNIST) or 3 (CIFAR-10 and CINIC-10); None takes 2
            for one-channel images and 3 otherwise.
        out_features: Units of the last layer, the features.
        paddings: Padding of each convolution, at least as many as convolutions. The paper is silent; the default
            follows its published implementation for 32x32 images and is carried over to the two-convolution network.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small or an argument is out of range.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import FedPACCNN, num_parameters
        >>> encoder = FedPACCNN(input_shape=(3, 32, 32))
        >>> encoder(torch.rand(2, 3, 32, 32)).shape, num_parameters(encoder)
        (torch.Size([2, 128]), 106400)
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        convolutions: int | None = None,
        out_features: int = 128,
        paddings: Sequence[int] = PADDINGS,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, "FedPACCNN")
        depth = convolutions if convolutions is not None else (2 if channels == 1 else 3)
        if depth not in (2, 3):
            raise ValueError(f"FedPACCNN has 2 or 3 convolutions, got convolutions={convolutions}")
        if len(paddings) < depth or min(paddings) < 0:
            raise ValueError(f"FedPACCNN needs {depth} paddings >= 0, one a convolution, got {tuple(paddings)}")
        if out_features < 1:
            raise ValueError(f"out_features must be at least 1, got {out_features}")
        layers: list[nn.Module] = []
        for filters, kernel, padding in list(zip(CHANNELS, KERNELS, paddings))[:depth]:
            # LeakyReLU increases, so it commutes with the maximum: pooling first gives the same at a quarter the work.
            layers += [nn.Conv2d(channels, filters, kernel, padding=padding), nn.MaxPool2d(2), nn.LeakyReLU()]
            channels = filters
            height = after_convolution(height, kernel, padding)
            width = after_convolution(width, kernel, padding)
        remedy = "use larger images, fewer convolutions or more padding"
        require_pixels(height, width, f"FedPACCNN with {depth} convolutions", input_shape, remedy)
        # On a CPU, pooling and convolution of this layout take half the time; the values are the same up to rounding.
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, out_features), nn.LeakyReLU())
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.features(self.convolutions(x))
        return features
