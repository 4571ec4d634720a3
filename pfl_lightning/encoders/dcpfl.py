"""The convolutional networks of DC-PFL (IJCAI 2024), sections 6.1 and 6.2: networks as in FedGH (ACM MM 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfl_lightning.encoders._shapes import after_convolution, image_shape, require_pixels
from pfl_lightning.encoders.registry import register

KERNEL = 5


@register("dcpfl_cnn1")
@register("dcpfl_cnn2", filters=(16, 16))
@register("dcpfl_cnn3", hidden=1000)
@register("dcpfl_cnn4", hidden=800)
@register("dcpfl_cnn5", hidden=500)
class DCPFLCNN(nn.Module):
    """Two 5x5 convolutions with ReLU and 2x2 max pooling, then two layers; five variants for heterogeneous clients.

    Clients differ in the filters of the second convolution and in the units of the layer after it; the features have
    500 units in every variant. Registered as ``dcpfl_cnn1`` (the defaults), ``dcpfl_cnn2`` (16 filters in the second
    convolution), ``dcpfl_cnn3``, ``dcpfl_cnn4`` and ``dcpfl_cnn5`` (1,000, 800 and 500 hidden units).

    The first layer sees all pixels, so its size grows with the image: 1.6 million parameters for 32x32 images and 180
    million for 224x224 ones.

    Args:
        input_shape: (channels, height, width) of one sample.
        filters: Channels of the two convolutions, which are not padded (the paper names no padding).
        hidden: Units of the first layer.
        out_features: Units of the second layer, the features (the paper's representation layer).
        final_relu: Whether ReLU follows the features too. The papers do not say; with it no two layers are linear in
            a row.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small or an argument is out of range.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import DCPFLCNN
        >>> DCPFLCNN(input_shape=(3, 32, 32), hidden=800)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 500])
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        filters: Sequence[int] = (16, 32),
        hidden: int = 2000,
        out_features: int = 500,
        final_relu: bool = True,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, "DCPFLCNN")
        if len(filters) != 2 or min(*filters, hidden, out_features) < 1:
            raise ValueError(
                "DCPFLCNN needs two convolutions and positive widths, "
                f"got filters={tuple(filters)}, hidden={hidden}, out_features={out_features}"
            )
        layers: list[nn.Module] = []
        for before, after in ((channels, filters[0]), (filters[0], filters[1])):
            # ReLU does not decrease, so it commutes with the maximum; after pooling there is a quarter to rectify.
            layers += [nn.Conv2d(before, after, KERNEL), nn.MaxPool2d(2), nn.ReLU()]
            height, width = after_convolution(height, KERNEL, 0), after_convolution(width, KERNEL, 0)
        require_pixels(height, width, "DCPFLCNN", input_shape, "use images of at least 16 x 16 pixels")
        # On a CPU, pooling and convolution of this layout take half the time; the values are the same up to rounding.
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.features = nn.Sequential(
            nn.Flatten(),
            nn.Linear(filters[1] * height * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, out_features),
            nn.ReLU() if final_relu else nn.Identity(),
        )
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.features(self.convolutions(x))
        return features
