"""The two-convolution network of FedProto (AAAI 2022) for MNIST and FEMNIST, in the widths that its clients have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfl_lightning.encoders._shapes import after_convolution, image_shape, require_pixels
from pfl_lightning.encoders.registry import register

FIRST = 10  # channels of the first convolution


# The paper gives two convolutions, 18, 20 or 22 output channels and 50 features. The first convolution's channels, the
# kernels, the dropout and that the second convolution is the one that varies are from its published code. That code's
# second dropout stands after the features, before the classifier, and is no part of an encoder.
@register("fedproto_cnn_18", channels=18)
@register("fedproto_cnn_20", channels=20)
@register("fedproto_cnn_22", channels=22)
@register("fedproto_cnn")
class FedProtoCNN(nn.Module):
    """Two convolutions with 2x2 max pooling and ReLU, then one layer with ReLU: 50 features at any width.

    Registered as ``fedproto_cnn`` and, for heterogeneous clients, ``fedproto_cnn_18``, ``fedproto_cnn_20`` and
    ``fedproto_cnn_22``, named by the channels of the second convolution. 28x28 images with 20 channels leave
    20 x 4 x 4 = 320 values for the last layer.

    Args:
        input_shape: (channels, height, width) of one sample.
        channels: Channels of the second convolution.
        out_features: Units of the last layer, the features (FedProto's prototypes are their class means).
        kernels: Kernel sizes of the two unpadded convolutions; (5, 5) as for MNIST, (3, 5) as for FEMNIST.
        dropout: Probability that a channel of the second convolution is dropped in training.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small or an argument is out of range.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import FedProtoCNN
        >>> [FedProtoCNN((1, 28, 28), channels)(torch.rand(2, 1, 28, 28)).shape[1] for channels in (18, 20, 22)]
        [50, 50, 50]
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        channels: int = 20,
        out_features: int = 50,
        kernels: Sequence[int] = (5, 5),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        before, height, width = image_shape(input_shape, "FedProtoCNN")
        if len(kernels) != 2 or min(*kernels, channels, out_features) < 1:
            raise ValueError(
                "FedProtoCNN needs two kernel sizes and positive widths, "
                f"got kernels={tuple(kernels)}, channels={channels}, out_features={out_features}"
            )
        for kernel in kernels:
            height, width = after_convolution(height, kernel, 0), after_convolution(width, kernel, 0)
        require_pixels(height, width, "FedProtoCNN", input_shape, "use larger images or smaller kernels")
        # On a CPU, pooling and convolution of this layout take half the time; the values are the same up to rounding.
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, FIRST, kernels[0]),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(FIRST, channels, kernels[1]),
            nn.Dropout2d(dropout),
            nn.MaxPool2d(2),
            nn.ReLU(),
        ).to(memory_format=torch.channels_last)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, out_features), nn.ReLU())
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.features(self.convolutions(x))
        return features
