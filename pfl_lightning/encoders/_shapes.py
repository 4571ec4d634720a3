"""Checks of input shapes that encoders share."""

from __future__ import annotations

from collections.abc import Sequence


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


def after_convolution(size: int, kernel: int, padding: int, pool: int = 2) -> int:
    """Side in pixels after a convolution of stride one and max pooling; zero if nothing is left.

    Example:
        >>> after_convolution(32, kernel=5, padding=0)
        14
    """
    return max(size + 2 * padding - kernel + 1, 0) // pool


def require_pixels(height: int, width: int, encoder: str, input_shape: Sequence[int], remedy: str) -> None:
    """Check that an image survives the convolutions.

    Raises:
        ValueError: If height or width is zero; names the encoder, the input and what was left of it.
    """
    if height < 1 or width < 1:
        raise ValueError(
            f"an input of shape {tuple(input_shape)} is too small for {encoder}: its convolutions and pooling leave "
            f"{height} x {width} pixels; {remedy}"
        )
