"""ResNet-18, ShuffleNet V2 and GoogLeNet from torchvision without their classifiers, as federated papers use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.googlenet import GoogLeNet as TorchvisionGoogLeNet
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.shufflenetv2 import ShuffleNetV2 as TorchvisionShuffleNetV2

from pfl_lightning.checks import check_at_least, check_choice
from pfl_lightning.encoders.convolutional import image_shape
from pfl_lightning.encoders.registry import register

# Classifiers, which an encoder replaces: the last layer and GoogLeNet's auxiliary heads.
CLASSIFIERS = ("fc.", "aux1.", "aux2.")

ENCODER = "encoder."
"""Beginning of an encoder's names in a client's model, and again in that of an encoder with a projector."""

SMALLEST = 15
"""Pixels; a smaller image has none left in GoogLeNet's third pooling."""


# FedProto (AAAI 2022) varies the strides of its ResNet-18 between clients. The paper names no numbers; its published
# code takes strides 1 and 4 of the first convolution and the pooling for half of the clients, 2 and 2 for the others.
@register("fedproto_resnet18_a", stem_strides=(1, 4))
@register("fedproto_resnet18_b", stem_strides=(2, 2))
@register("resnet18_small", stem="small")
@register("resnet18_512", out_features=512)
@register("resnet18")
class ResNet18(ResNet):
    """torchvision's ResNet-18 (He et al., CVPR 2016) without its classifier: 512 pooled features.

    Registered as ``resnet18``, as ``resnet18_small`` (the stem for small images), as ``resnet18_512`` (a linear layer
    to 512 features follows the pooling, as in FedClassAvg, section 4.1), and as ``fedproto_resnet18_a`` and
    ``fedproto_resnet18_b`` (strides 1 and 4, and 2 and 2, of the stem).

    Images of 32x32 and less leave one pixel in the last stage of the ImageNet stem. Batch normalization cannot train
    on one such image: let batches there have two samples at least, or take the small stem.

    Args:
        input_shape: (channels, height, width) of one sample.
        stem: ``imagenet`` (a 7x7 convolution with stride 2 and 3x3 max pooling with stride 2), or ``small`` (a 3x3
            convolution with stride 1 and no pooling).
        layers: Residual blocks of each of the four stages; (1, 1, 1, 1) is ResNet-10.
        out_features: None for the 512 pooled features; a number adds one linear layer of that many units.
        strides: Stride of each of the four stages.
        stem_strides: Strides of the ImageNet stem's convolution and pooling.
        weights: A local file with torchvision's weights (``resnet18-f37072fd.pth``), or with a client's model of the
            same network that ``pfl export`` wrote; None for random ones. Its classifier is not used. For one-channel
            images the first filters are summed over the colors.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If an argument is out of range, or ``weights`` are of another network.
        FileNotFoundError: If there is no file ``weights``.

    Example:
        >>> import torch
        >>> from pfl_lightning.encoders import ResNet18
        >>> resnet10 = ResNet18(input_shape=(3, 32, 32), stem="small", layers=(1, 1, 1, 1))
        >>> resnet10(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 512])
    """

    conv1: nn.Conv2d
    maxpool: nn.Module

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        stem: Literal["imagenet", "small"] = "imagenet",
        layers: Sequence[int] = (2, 2, 2, 2),
        out_features: int | None = None,
        strides: Sequence[int] = (1, 2, 2, 2),
        stem_strides: Sequence[int] = (2, 2),
        weights: str | None = None,
    ) -> None:
        channels, height, width = image_shape(input_shape, "ResNet18")
        _check(stem, layers, strides, stem_strides)
        features = feature_width(out_features, 512)
        super().__init__(BasicBlock, list(layers), num_classes=features)
        self.out_features = features
        if out_features is None:
            self.fc = nn.Identity()
        self._set_stem(channels, stem, stem_strides)
        for stage, stride in zip((self.layer1, self.layer2, self.layer3, self.layer4), strides):
            _set_stride(stage, stride)
        if weights is not None:
            load_weights(self, weights, "conv1.weight", "resnet18-f37072fd.pth")
        # On a CPU, this layout trains large maps up to a tenth faster, the small ones of 32x32 images a little slower
        # (benchmarks/encoders.py); the values are the same up to rounding.
        if stem == "small" or max(height, width) > 32:
            self.to(memory_format=torch.channels_last)

    def _set_stem(self, channels: int, stem: str, strides: Sequence[int]) -> None:
        if stem == "small":
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = for_channels(self.conv1, channels)
            self.conv1.stride = (strides[0], strides[0])
            self.maxpool = nn.MaxPool2d(3, stride=strides[1], padding=1)
        if stem == "small" or channels != 3:
            _initialize(self.conv1)


def _check(stem: str, layers: Sequence[int], strides: Sequence[int], stem_strides: Sequence[int]) -> None:
    check_choice("the stem of ResNet18", stem, ("imagenet", "small"))
    for name, numbers, length in (("layers", layers, 4), ("strides", strides, 4), ("stem_strides", stem_strides, 2)):
        if len(numbers) != length or min(numbers) < 1:
            raise ValueError(f"{name} of ResNet18 are {length} positive numbers, got {tuple(numbers)}")
    if stem == "small" and tuple(stem_strides) != (2, 2):
        raise ValueError(f"stem_strides are for the ImageNet stem, the small stem has none; got {tuple(stem_strides)}")


def _set_stride(stage: nn.Module, stride: int) -> None:
    block = next(stage.children())
    assert isinstance(block, BasicBlock)
    block.conv1.stride = (stride, stride)
    if block.downsample is not None:
        block.downsample[0].stride = (stride, stride)
    elif stride != 1:  # the first stage keeps size and channels, so torchvision gives it no projection
        projection = nn.Conv2d(block.conv1.in_channels, block.conv1.out_channels, 1, stride=stride, bias=False)
        _initialize(projection)
        block.downsample = nn.Sequential(projection, nn.BatchNorm2d(projection.out_channels))
    block.stride = stride


def _initialize(convolution: nn.Conv2d) -> None:
    """Draw a convolution's weights as torchvision draws those of its ResNets."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


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
        width = feature_width(out_features, 1024)
        # The width 1.0 of the paper: blocks of the stages; channels of the stem, the stages and the last convolution.
        super().__init__([4, 8, 4], [24, 116, 232, 464, 1024], num_classes=width)
        self.out_features = width
        if out_features is None:
            self.fc = nn.Identity()
        first = self.conv1[0]
        assert isinstance(first, nn.Conv2d)
        self.conv1[0] = for_channels(first, channels)
        if weights is not None:
            load_weights(self, weights, "conv1.0.weight", "shufflenetv2_x1-5666bf0f80.pth")
        # On a CPU, this layout trains about a quarter faster (benchmarks/encoders.py); same values up to rounding.
        self.to(memory_format=torch.channels_last)


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
        features = feature_width(out_features, 1024)
        # Without weights of its own torchvision's default draws these and warns that the default will change.
        super().__init__(num_classes=features, aux_logits=False, transform_input=transform_input, init_weights=True)
        self.out_features = features
        if out_features is None:
            self.fc = nn.Identity()
        first = for_channels(self.conv1.conv, channels)
        if first is not self.conv1.conv:
            nn.init.trunc_normal_(first.weight, std=0.01)
            self.conv1.conv = first
        if weights is not None:
            load_weights(self, weights, "conv1.conv.weight", "googlenet-1378be20.pth")
        # On a CPU, this layout trains about a quarter faster (benchmarks/encoders.py); same values up to rounding.
        self.to(memory_format=torch.channels_last)


def for_channels(convolution: nn.Conv2d, channels: int) -> nn.Conv2d:
    """Return a network's first convolution: itself, or one like it, freshly initialized, for ``channels`` channels."""
    if convolution.in_channels == channels:
        return convolution
    sizes: Any = {name: getattr(convolution, name) for name in ("out_channels", "kernel_size", "stride", "padding")}
    return nn.Conv2d(channels, **sizes, bias=convolution.bias is not None)


def feature_width(out_features: int | None, native: int) -> int:
    """Return the width of the features, ``native`` if the last layer is removed.

    Raises:
        ValueError: If the width is below one.
    """
    width = native if out_features is None else out_features
    check_at_least("out_features", width, 1)
    return width


def load_weights(network: nn.Module, path: str, first: str, known_file: str) -> None:
    """Load a local file into a network, all but the classifiers: torchvision's state dict, or a client's model.

    Of a model that ``pfl export`` wrote, the encoder is taken, with its last layer where both have one of the
    same shape.

    A network for one channel gets the sum of the first convolution's filters over the three colors. Its output for a
    gray image is that of the file's network for the same image in all three channels.

    Args:
        network: The encoder.
        path: The file; ``~`` is the home directory. Nothing is downloaded.
        first: Name of the first convolution's weight.
        known_file: Name of torchvision's own file for this network, for the error messages.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no state dict, or one of another network; the first differences are named.
    """
    encoder, own = type(network).__name__, network.state_dict()
    read = _read(Path(path).expanduser(), encoder, known_file)
    state = _encoder_of(read, first)
    # Of torchvision's file ``fc`` is its classifier, of a client's model the layer of features, where it has one.
    shapes = [found["fc.weight"].shape for found in (state, own) if state is not read and "fc.weight" in found]
    left_out = CLASSIFIERS[1:] if len(shapes) == 2 and shapes[0] == shapes[1] else CLASSIFIERS
    loaded = {name: value for name, value in state.items() if not name.startswith(left_out)}
    if first in loaded and loaded[first].ndim == 4 and loaded[first].shape[1] == 3 and own[first].shape[1] == 1:
        loaded[first] = loaded[first].sum(dim=1, keepdim=True)
    try:
        missing, unexpected = network.load_state_dict(loaded, strict=False)
    except RuntimeError as error:  # of other shapes
        wrong = str(error)
    else:
        kinds = {"missing": [name for name in missing if not name.startswith(left_out)], "unexpected": unexpected}
        wrong = "; ".join(f"{', '.join(names[:3])} ({len(names)}) {kind}" for kind, names in kinds.items() if names)
    if wrong:
        raise ValueError(
            f"the weights in {path} do not fit {encoder} for {own[first].shape[1]} channels with these "
            f"arguments; expected a file of `pfl export`, or torchvision's {known_file} (for 3 channels or 1): {wrong}"
        )


def _encoder_of(state: Mapping[str, Tensor], first: str) -> Mapping[str, Tensor]:
    """The encoder's part of a client's model; a state dict of the network itself stays as it is."""
    while first not in state and any(name.startswith(ENCODER) for name in state):
        state = {name.removeprefix(ENCODER): value for name, value in state.items() if name.startswith(ENCODER)}
    return state


def _read(file: Path, encoder: str, known_file: str) -> Mapping[str, Tensor]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{encoder} expects its weights in {file}, where there is no file. Nothing is downloaded: put "
            f"torchvision's {known_file} or a model of `pfl export` there, or leave weights out for random initial "
            "weights"
        )
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("it does not map names to tensors: save network.state_dict()")
    except Exception as error:  # whatever torch raises for a file that it did not write
        raise ValueError(
            f"{encoder} expects a state dict of torchvision such as {known_file}; {file} cannot be read by "
            f"torch.load(weights_only=True): {error}"
        ) from error
    return state
