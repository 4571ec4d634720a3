"""ShuffleNet V2 from torchvision, without its classifier."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.shufflenetv2 import ShuffleNetV2 as TorchvisionShuffleNetV2

from pfl_lightning.encoders._shapes import image_shape
from pfl_lightning.encoders._torchvision import feature_width, for_channels, load_weights, remove_classifier
from pfl_lightning.encoders.registry import register

WEIGHTS_FILE = "shufflenetv2_x1-5666bf0f80.pth"
POOLED = 1024
# The width 1.0 of the paper: blocks of the three stages, and channels of the stem, the stages and the last convolution.
REPEATS = (4, 8, 4)
CHANNELS = (24, 116, 232, 464, POOLED)


@register("shufflenet_v2")
class ShuffleNetV2(TorchvisionShuffleNetV2):
    """torchvision's ShuffleNet V2 x1.0 (Ma et al., ECCV 2018) with one linear layer to 512 features, as in FedClassAvg.

    Batches of training need two samples at least where images leave one pixel (32x32 and less), for batch
    normalization.

    Args:
        input_shape: (channels, height, width) of one sample.
        out_features: Units of the linear layer; None for the 1,024 pooled features without it.
        weights: A local file with torchvision's weights (``shufflenetv2_x1-5666bf0f80.pth``), or with a client's
            model of the same network that ``pfl export`` wrote; None for random ones. Its classifier is not used. For
            one-channel images the first filters are summed over the colors.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If an argument is out of range, or ``weights`` are of another network.
        FileNotFoundError: If there is no file ``weights``.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], out_features: int | None = 512, weights: str | None = None
    ) -> None:
        channels, _, _ = image_shape(input_shape, "ShuffleNetV2")
        width = feature_width(out_features, POOLED)
        super().__init__(list(REPEATS), list(CHANNELS), num_classes=width)
        self.out_features = width
        if out_features is None:
            remove_classifier(self)
        first = self.conv1[0]
        assert isinstance(first, nn.Conv2d)
        self.conv1[0] = for_channels(first, channels)
        if weights is not None:
            load_weights(self, weights, "conv1.0.weight", WEIGHTS_FILE)
        # On a CPU, this layout trains about a quarter faster (benchmarks/encoders.py); same values up to rounding.
        self.to(memory_format=torch.channels_last)
