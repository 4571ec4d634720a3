"""GoogLeNet from torchvision, without its classifiers."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.googlenet import GoogLeNet as TorchvisionGoogLeNet

from pfl_lightning.encoders._shapes import image_shape
from pfl_lightning.encoders._torchvision import feature_width, for_channels, load_weights, remove_classifier
from pfl_lightning.encoders.registry import register

WEIGHTS_FILE = "googlenet-1378be20.pth"
POOLED = 1024
SMALLEST = 15  # pixels; a smaller image has none left in the third pooling


@register("googlenet")
class GoogLeNet(TorchvisionGoogLeNet):
    """torchvision's GoogLeNet (Szegedy et al., CVPR 2015) with one linear layer to 512 features, as in FedClassAvg.

    It has no auxiliary heads. The dropout of torchvision stays between the pooling and the linear layer. Initial
    weights are torchvision's: normal with standard deviation 0.01. Batches of training need two samples at least where
    images leave one pixel (32x32 and less), for batch normalization.

    Args:
        input_shape: (channels, height, width) of one sample, at least 15x15.
        out_features: Units of the linear layer; None for the 1,024 pooled features without it.
        transform_input: Whether to bring inputs with ImageNet's mean and standard deviation to the scale of the
            network that ``weights`` come from, as torchvision does with its own weights; for three channels.
        weights: A local file with torchvision's weights (``googlenet-1378be20.pth``), or with a client's
            model of the same network that ``pfl export`` wrote; None for random ones. Its classifiers are not used. For
            one-channel images the first filters are summed over the colors.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small, an argument is out of range, or ``weights`` are of another network.
        FileNotFoundError: If there is no file ``weights``.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        out_features: int | None = 512,
        transform_input: bool = False,
        weights: str | None = None,
    ) -> None:
        channels, height, width = image_shape(input_shape, "GoogLeNet")
        if min(height, width) < SMALLEST:
            raise ValueError(
                f"an input of shape {tuple(input_shape)} is too small for GoogLeNet: its pooling needs "
                f"{SMALLEST} x {SMALLEST} pixels; use larger images or resnet18_small"
            )
        if transform_input and channels != 3:
            raise ValueError(f"transform_input is for images of 3 channels, got {channels}; leave it out")
        features = feature_width(out_features, POOLED)
        # Without weights of its own torchvision's default draws these and warns that the default will change.
        super().__init__(num_classes=features, aux_logits=False, transform_input=transform_input, init_weights=True)
        self.out_features = features
        if out_features is None:
            remove_classifier(self)
        first = for_channels(self.conv1.conv, channels)
        if first is not self.conv1.conv:
            nn.init.trunc_normal_(first.weight, std=0.01)
            self.conv1.conv = first
        if weights is not None:
            load_weights(self, weights, "conv1.conv.weight", WEIGHTS_FILE)
        # On a CPU, this layout trains about a quarter faster (benchmarks/encoders.py); same values up to rounding.
        self.to(memory_format=torch.channels_last)
