"""Descriptions of the registered encoders, for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pfl_lightning.encoders.registry import build_encoder, encoder_class, encoder_names

__all__ = ["EncoderDescription", "describe_encoders", "num_parameters"]


@dataclass(frozen=True)
class EncoderDescription:
    """A registered encoder for samples of one shape.

    Attributes:
        name: Registered name.
        encoder: Name of the class.
        out_features: Width of the features; None if the encoder does not accept such samples.
        parameters: Number of parameters; None if the encoder does not accept such samples.
        reason: Reason why the encoder does not accept such samples; None if it does.
    """

    name: str
    encoder: str
    out_features: int | None
    parameters: int | None
    reason: str | None = None


def num_parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters, trainable or not, without its buffers.

    Example:
        >>> num_parameters(nn.Linear(10, 2))
        22
    """
    return sum(parameter.numel() for parameter in module.parameters())


def describe_encoders(input_shape: Sequence[int]) -> list[EncoderDescription]:
    """Describe all registered encoders.

    They are built without memory for their parameters (on torch's meta device), so large ones cost nothing.

    Args:
        input_shape: Shape of one sample, for instance (channels, height, width).

    Returns:
        One description per name, sorted by name.

    Example:
        >>> [one.parameters for one in describe_encoders((3, 32, 32)) if one.name.startswith("dcpfl_cnn")]
        [2616548, 1810132, 1315548, 1055348, 665048]
    """
    return [_describe(name, input_shape) for name in encoder_names()]


def _describe(name: str, input_shape: Sequence[int]) -> EncoderDescription:
    kind = encoder_class(name).__name__
    try:
        with torch.device("meta"):
            encoder = build_encoder(name, input_shape)
    except (ValueError, TypeError) as error:  # a user-defined encoder may raise; the others are described
        return EncoderDescription(name, kind, None, None, str(error))
    width = encoder.out_features
    assert isinstance(width, int)  # build_encoder checks it
    return EncoderDescription(name, kind, width, num_parameters(encoder))
