"""Torchvision's networks as encoders: number of input channels and of features, and weights from a local file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Classifiers, which an encoder replaces: the last layer and GoogLeNet's auxiliary heads.
CLASSIFIERS = ("fc.", "aux1.", "aux2.")

ENCODER = "encoder."
"""Beginning of an encoder's names in a client's model, and again in that of an encoder with a projector."""


def for_channels(convolution: nn.Conv2d, channels: int) -> nn.Conv2d:
    """Return a network's first convolution: itself, or one like it, freshly initialized, for ``channels`` channels."""
    if convolution.in_channels == channels:
        return convolution
    return nn.Conv2d(
        channels,
        convolution.out_channels,
        convolution.kernel_size,  # type: ignore[arg-type]
        stride=convolution.stride,  # type: ignore[arg-type]
        padding=convolution.padding,  # type: ignore[arg-type]
        bias=convolution.bias is not None,
    )


def feature_width(out_features: int | None, native: int) -> int:
    """Return the width of the features, ``native`` if the last layer is removed.

    Raises:
        ValueError: If the width is below one.
    """
    width = native if out_features is None else out_features
    if width < 1:
        raise ValueError(f"out_features must be at least 1 (or None for the {native} pooled ones), got {out_features}")
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
            f"the weights in {path} are not those of {encoder} for {own[first].shape[1]} channels with these "
            f"arguments, whose file is one of `pfl export` or torchvision's {known_file} (for 3 channels or 1): {wrong}"
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
            raise ValueError("it holds something else than names with tensors: save network.state_dict()")
    except Exception as error:  # whatever a file that is none of torch's makes of it
        raise ValueError(
            f"{encoder} expects a state dict of torchvision such as {known_file}; {file} cannot be read by "
            f"torch.load(weights_only=True): {error}"
        ) from error
    return state
