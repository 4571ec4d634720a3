"""Adaptation of torchvision's networks to encoders: number of input channels, and weights from a local file."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

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


def remove_classifier(network: nn.Module) -> None:
    """Replace the last layer ``fc`` of a torchvision network by the identity."""
    network.fc = nn.Identity()


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
    encoder = type(network).__name__
    read, own_state = _read(path, encoder, known_file), network.state_dict()
    state = _encoder_of(read, first)
    # Of torchvision's file ``fc`` is its classifier, of a client's model the layer of features, where it has one.
    shapes = [found["fc.weight"].shape for found in (state, own_state) if state is not read and "fc.weight" in found]
    has_features = len(shapes) == 2 and shapes[0] == shapes[1]
    left_out = CLASSIFIERS[1:] if has_features else CLASSIFIERS
    loaded = {name: value for name, value in state.items() if not name.startswith(left_out)}
    own = {name: value for name, value in own_state.items() if not name.startswith(left_out)}
    if first in loaded and loaded[first].ndim == 4 and loaded[first].shape[1] == 3 and own[first].shape[1] == 1:
        loaded[first] = loaded[first].sum(dim=1, keepdim=True)
    differences = _differences(own, loaded)
    if differences:
        raise ValueError(
            f"the weights in {path} are not those of {encoder} for {own[first].shape[1]} channels with these "
            f"arguments, whose file is one of `pfl export` or torchvision's {known_file} (for 3 channels or 1): "
            f"{'; '.join(differences)}"
        )
    network.load_state_dict(loaded, strict=False)


def _encoder_of(state: Mapping[str, Tensor], first: str) -> Mapping[str, Tensor]:
    """The encoder's part of a client's model; a state dict of the network itself stays as it is."""
    while first not in state and any(name.startswith(ENCODER) for name in state):
        state = {name.removeprefix(ENCODER): value for name, value in state.items() if name.startswith(ENCODER)}
    return state


def _read(path: str, encoder: str, known_file: str) -> Mapping[str, Tensor]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"{encoder} expects its weights in {file}, where there is no file. Nothing is downloaded: put "
            f"torchvision's {known_file} or a model of `pfl export` there, or leave weights out for random initial "
            "weights"
        )
    expected = f"{encoder} expects a state dict of torchvision such as {known_file}"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{expected}; {file} cannot be read by torch.load(weights_only=True): {reason}") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        names = ", ".join(str(name) for name in list(state)[:3]) if isinstance(state, Mapping) else ""
        holds = f"a {type(state).__name__}" + (f" of {names}, ..." if names else "")
        raise ValueError(f"{expected}, names with tensors; {file} holds {holds}. Save network.state_dict()")
    return state


def _differences(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> list[str]:
    # Files from before torch 0.4.1 count no batches; torch sets the counters to 0.
    missing = [name for name in own if name not in loaded and not name.endswith(".num_batches_tracked")]
    shapes = [
        f"{name} has shape {tuple(loaded[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in loaded and loaded[name].shape != value.shape
    ]
    kinds: list[tuple[str, Iterable[str]]] = [
        ("missing", missing),
        ("unexpected", [name for name in loaded if name not in own]),
        ("misshapen", shapes),
    ]
    return [f"{_count(list(names))} {kind}" for kind, names in kinds if names]


def _count(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{shown} ({len(names)})"
