"""Convolutional networks of federated papers for small images: FedAvg, FedPAC, FedProto, DC-PFL, FedClassAvg."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_choice
from pfl_lightning.encoders.registry import register


def image_shape(input_shape: Sequence[int], encoder: str) -> tuple[int, int, int]:
    """Return ``input_shape`` as (channels, height, width).

    Raises:
        ValueError: If it is not three positive integers.
    """
    shape = tuple(int(size) for size in input_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"{encoder} needs input_shape=(channels, height, width) of positive integers, got {tuple(input_shape)}"
        )
    return shape[0], shape[1], shape[2]


class ConvolutionalEncoder(nn.Module):
    """Convolutions with 2x2 max pooling and an activation each, then linear layers with it.

    Args:
        input_shape: (channels, height, width) of one sample.
        convolutions: Filters, side of the kernel and padding of each convolution.
        widths: Units of the linear layers; the last ones are the features.
        activation: What follows each layer.
        channel_dropout: Probability that a channel of the last convolution is dropped in training; ``None`` for none.
        final_activation: Whether the activation follows the features, too.

    Shape:
        (N, *input_shape) to (N, out_features).

    Raises:
        ValueError: If the image is too small or a width is below one.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        convolutions: Sequence[tuple[int, int, int]],
        widths: Sequence[int],
        activation: type[nn.Module] = nn.ReLU,
        channel_dropout: float | None = None,
        final_activation: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        channels, height, width = image_shape(input_shape, name)
        if min(*widths, *(min(filters, kernel) for filters, kernel, _ in convolutions)) < 1:
            sizes = [(filters, kernel) for filters, kernel, _ in convolutions]
            raise ValueError(
                f"{name} needs positive widths, got convolutions (filters, kernel) {sizes} and layers {list(widths)}"
            )
        layers: list[nn.Module] = []
        for number, (filters, kernel, padding) in enumerate(convolutions, start=1):
            layers.append(nn.Conv2d(channels, filters, kernel, padding=padding))
            if channel_dropout is not None and number == len(convolutions):
                layers.append(nn.Dropout2d(channel_dropout))
            # The activation does not decrease, so that pooling first gives the same at a quarter of the work.
            layers += [nn.MaxPool2d(2), activation()]
            channels = filters
            height, width = (max(size + 2 * padding - kernel + 1, 0) // 2 for size in (height, width))
        if min(height, width) < 1:
            raise ValueError(
                f"an input of shape {tuple(input_shape)} is too small for {name} with {len(convolutions)} "
                f"convolutions: they leave {height} x {width} pixels; use larger images or fewer convolutions"
            )
        # On a CPU, pooling and convolution of this layout take half the time; the values are the same up to rounding.
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        linear: list[nn.Module] = []
        for before, after in itertools.pairwise([channels * height * width, *widths]):
            linear += [nn.Linear(before, after), activation()]
        if not final_activation:
            linear[-1] = nn.Identity()
        self.features = nn.Sequential(nn.Flatten(), *linear)
        self.out_features = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.features(self.convolutions(x))
        return features


@register("fedavg_cnn", channels=(32, 64), kernel_size=5, out_features=512)
@register("small_cnn")
class SmallCNN(ConvolutionalEncoder):
    """Convolutions, padded so that the size stays, with 2x2 max pooling and ReLU, then one layer with ReLU.

    An 8x8 image with the two default convolutions leaves 32 x 2 x 2 = 128 values for the last layer. Registered as
    ``small_cnn`` (the defaults), and as ``fedavg_cnn``, the network of the FedAvg paper (McMahan et al., AISTATS 2017)
    for MNIST: 5x5 convolutions with 32 and 64 channels, and 512 features.

    Args:
        input_shape: (channels, height, width) of one sample.
        channels: Channels of each convolution.
        out_features: Units of the last layer, the features.
        kernel_size: Side of the convolutions' kernels in pixels, an odd number.

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
        if len(channels) == 0 or kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(
                "SmallCNN needs at least one convolution and an odd, positive kernel_size, got "
                f"channels={tuple(channels)}, kernel_size={kernel_size}"
            )
        padded = [(filters, kernel_size, kernel_size // 2) for filters in channels]
        super().__init__(input_shape, padded, (out_features,))


# The paper names no padding. Its published code pads the convolutions for 32 x 32 images by 0, 1 and 1, which leaves
# 64 x 3 x 3 values. The smaller network is described as the same without its last convolution and is padded alike.
@register("fedpac_cnn")
class FedPACCNN(ConvolutionalEncoder):
    """The encoder of FedPAC (ICLR 2023, section 6.1): two or three convolutions, then 128 units, with LeakyReLU.

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
        paddings: Sequence[int] = (0, 1, 1),
    ) -> None:
        channels, _, _ = image_shape(input_shape, "FedPACCNN")
        depth = convolutions if convolutions is not None else (2 if channels == 1 else 3)
        if depth not in (2, 3):
            raise ValueError(f"FedPACCNN has 2 or 3 convolutions, got convolutions={convolutions}")
        if len(paddings) < depth or min(paddings) < 0:
            raise ValueError(f"FedPACCNN needs {depth} paddings >= 0, one for each convolution, got {tuple(paddings)}")
        layers = list(zip((16, 32, 64), (5, 5, 3), paddings))[:depth]
        super().__init__(input_shape, layers, (out_features,), nn.LeakyReLU)


# The paper gives two convolutions, 18, 20 or 22 output channels and 50 features. The first convolution's channels, the
# kernels, the dropout and that the second convolution is the one that varies are from its published code. That code's
# second dropout stands after the features, before the classifier, and is no part of an encoder.
@register("fedproto_cnn_18", channels=18)
@register("fedproto_cnn_20", channels=20)
@register("fedproto_cnn_22", channels=22)
@register("fedproto_cnn")
class FedProtoCNN(ConvolutionalEncoder):
    """The network of FedProto (AAAI 2022) for MNIST and FEMNIST: two convolutions, 50 features at any width.

    Registered as ``fedproto_cnn`` and, for heterogeneous clients, ``fedproto_cnn_18``, ``fedproto_cnn_20`` and
    ``fedproto_cnn_22``, named by the channels of the second convolution. 28x28 images with 20 channels leave
    20 x 4 x 4 = 320 values for the last layer.

    Args:
        input_shape: (channels, height, width) of one sample.
        channels: Channels of the second convolution.
        out_features: Units of the last layer, the features (FedProto's prototypes are their class means).
        kernels: Kernel sizes of the two unpadded convolutions; (5, 5) as for MNIST, (3, 5) as for FEMNIST.
        dropout: Probability that a channel of the second convolution is dropped in training.

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
        if len(kernels) != 2:
            raise ValueError(f"FedProtoCNN needs two kernel sizes, got kernels={tuple(kernels)}")
        layers = [(10, kernels[0], 0), (channels, kernels[1], 0)]
        super().__init__(input_shape, layers, (out_features,), channel_dropout=dropout)


@register("dcpfl_cnn1")
@register("dcpfl_cnn2", filters=(16, 16))
@register("dcpfl_cnn3", hidden=1000)
@register("dcpfl_cnn4", hidden=800)
@register("dcpfl_cnn5", hidden=500)
class DCPFLCNN(ConvolutionalEncoder):
    """The networks of DC-PFL (IJCAI 2024), as in FedGH (ACM MM 2023): two 5x5 convolutions, then two layers.

    Clients differ in the filters of the second convolution and in the units of the layer after it; the features have
    500 units in every variant. Registered as ``dcpfl_cnn1`` (the defaults), ``dcpfl_cnn2`` (16 filters in the second
    convolution), ``dcpfl_cnn3``, ``dcpfl_cnn4`` and ``dcpfl_cnn5`` (1,000, 800 and 500 hidden units).

    The first layer sees all pixels, so its size grows with the image: 1.6 million parameters for 32x32 images and 180
    million for 224x224 ones. Images have at least 16 x 16 pixels.

    Args:
        input_shape: (channels, height, width) of one sample.
        filters: Channels of the two convolutions, which are not padded (the paper names no padding).
        hidden: Units of the first layer.
        out_features: Units of the second layer, the features (the paper's representation layer).
        final_relu: Whether ReLU follows the features too. The papers do not say; with it no two layers are linear in
            a row.

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
        if len(filters) != 2:
            raise ValueError(f"DCPFLCNN needs two convolutions, got filters={tuple(filters)}")
        layers = [(number, 5, 0) for number in filters]
        super().__init__(input_shape, layers, (hidden, out_features), final_activation=final_relu)


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
        check_at_least("out_features", out_features, 1)
        check_at_least("hidden", hidden, 1, optional=True)
        check_choice("pooling", pooling, ("halving", "published"))
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
