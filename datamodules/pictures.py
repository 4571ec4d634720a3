"""Pictures as unsigned bytes: palettes, 16-bit grays and other kinds of pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]

_MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""

_SIXTEEN_BITS = ("PNG", "PPM")
"""Formats whose 16-bit grays Pillow may hold as 32-bit numbers, from 0 to 65535."""


def to_bytes(picture: Image) -> Image:
    """Picture with a byte for each channel, of a mode that arrays show as it looks: L, LA, RGB or RGBA.

    Of 16 bits the upper eight are kept, as Pillow does where it reads colors of 16 bits. Pictures of floats and of
    32-bit numbers, whose range is unknown, stay as they are.

    Args:
        picture: The picture, of any mode.

    Example:
        >>> from PIL import Image
        >>> picture = Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16))
        >>> np.asarray(picture.convert("L")).tolist()  # cut off at 255
        [[0, 255, 255]]
        >>> np.asarray(to_bytes(picture)).tolist()
        [[0, 1, 255]]
    """
    from PIL import Image

    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and picture.format in _SIXTEEN_BITS):
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
    if mode == "1":
        return picture.convert("L")
    return picture if mode in ("L", "LA", "RGB", "RGBA", "I", "F") else picture.convert("RGB")


def decode_image(path: str, image_size: int | None, channels: Literal[1, 3] = 3) -> Pixels:
    """Decode an image file as red, green and blue, or as gray.

    Args:
        path: The file.
        image_size: Side to which it is scaled, whatever its proportions; None to keep its size.
        channels: 3 for red, green and blue, alike where the file is gray; 1 for gray, of colors by Pillow's standard
            conversion, 0.299 red + 0.587 green + 0.114 blue.

    Returns:
        The pixels, shape (channels, H, W).

    Raises:
        ValueError: If the file cannot be read, or has pixels without a known range.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            _check_kind(image)
            picture = to_bytes(image).convert(_MODES[channels])
    except Exception as error:  # of a damaged file, decoders raise errors of any class
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read the image {path}: {what}; replace or remove the file") from error
    if image_size is not None and picture.size != (image_size, image_size):
        picture = picture.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[np.newaxis] if channels == 1 else pixels.transpose(2, 0, 1)


def _check_kind(image: Any) -> None:
    """Refuse pixels whose range is unknown."""
    if image.mode == "F" or (image.mode == "I" and image.format not in _SIXTEEN_BITS):
        raise ValueError(
            f"its pixels are {'floats' if image.mode == 'F' else '32-bit numbers'}, whose range is unknown: convert it "
            "to 8 or 16 bits"
        )
