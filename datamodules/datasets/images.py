"""Image files: listed, decoded as bytes whatever their kind of pixels, and kept in a cache file."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from pfl_lightning.errors import DiskFullError
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]

DECODER = 3
"""Number of the rules by which files become pixels, and are kept: caches of other rules have other names."""

DAY = 86_400
"""Seconds after which a half-written file has no writer any more."""

_MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""

_SIXTEEN_BITS = ("PNG", "PPM")
"""Formats whose 16-bit grays Pillow may hold as 32-bit numbers, from 0 to 65535."""

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageFile:
    """One image file.

    Attributes:
        path: Path of the file.
        label: Class, counted from 0 in the order of the class folders' names.
        size: Size in bytes.
        modified: Time of the last change, in nanoseconds.
    """

    path: str
    label: int
    size: int
    modified: int


def list_folders(folder: Path) -> list[str]:
    """Names of a folder's subfolders, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def images_in(folder: Path, label: int = 0) -> list[ImageFile]:
    """Images that lie in a folder itself, sorted by name.

    Args:
        folder: The folder. Hidden files, and files that are no images by their suffix, are ignored.
        label: Their class.

    Raises:
        FileNotFoundError: If an image is a broken link.
    """
    with os.scandir(folder) as scanned:
        found = [entry for entry in scanned if entry.name.lower().endswith(_ENDINGS) and entry.name[0] != "."]
        files = [(entry.path, entry.stat()) for entry in sorted(found, key=lambda entry: entry.name)]
    return [ImageFile(path, label, own.st_size, own.st_mtime_ns) for path, own in files]


def list_images(folder: Path, classes: Sequence[str] | None = None) -> tuple[list[ImageFile], list[str]]:
    """List the images of a folder that has one folder per class.

    Args:
        folder: The folder.
        classes: The class folders to list, in this order; None for all.

    Returns:
        The files, classes sorted by name and files sorted by name within a class, and the class names.

    Raises:
        FileNotFoundError: If there is no class folder, or a class folder has no images.
    """
    names = list_folders(folder) if classes is None else list(classes)
    if not names:
        raise FileNotFoundError(f"no class folders in {folder}: expected {folder}/<class>/<image file>")
    files: list[ImageFile] = []
    for label, name in enumerate(names):
        if below := list_folders(folder / name):
            warnings.warn(
                f"the class folder {folder / name} has subfolders, which are not read: {', '.join(below[:3])}. "
                "Move their images up",
                stacklevel=2,
            )
        images = images_in(folder / name, label)
        if not images:
            raise FileNotFoundError(
                f"no images in the class folder {folder / name}: expected files ending in {', '.join(_ENDINGS)}; "
                "remove the folder if the class is not wanted"
            )
        files += images
    return files, names


def load_images(
    files: list[ImageFile], root: Path, image_size: int | None, cache_dir: Path, choice: str = ""
) -> Pixels:
    """Decode images, or read them from the cache if it was made of the same files.

    Args:
        files: The images.
        root: Folder that contains all files; names the cache.
        image_size: Side to which every image is scaled; None if all have one size.
        cache_dir: Folder of the cache.
        choice: Name of the selection from the root, so that another selection has a separate cache.

    Returns:
        The pixels, shape (N, 3, H, W), in the order of ``files``.
    """
    listing = fingerprint(files, root, image_size)
    what = f"{root.resolve()}\0{image_size}{choice}\0{DECODER}"
    name = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:16]
    cache = cache_dir / f"{root.resolve().name}-{name}.npz"
    pixels = _read_cache(cache, listing)
    if pixels is None:
        pixels = decode_images(files, image_size)
        _write_cache(cache, pixels, listing)
    return pixels


def decode_images(files: list[ImageFile], image_size: int | None, channels: Literal[1, 3] = 3) -> Pixels:
    """Decode images into one array, with all processor cores.

    Args:
        files: The images.
        image_size: Side to which every image is scaled; None if all have one size.
        channels: 3 for red, green and blue, 1 for gray.

    Returns:
        The pixels, shape (N, channels, H, W).

    Raises:
        ValueError: If a file cannot be read, or sizes differ and ``image_size`` is None.
    """
    first = decode_image(files[0].path, image_size, channels)
    pixels = np.empty((len(files), *first.shape), dtype=np.uint8)

    def decode(start: int) -> None:
        for place in range(start, min(start + chunk, len(files))):
            image = decode_image(files[place].path, image_size, channels)
            if image.shape != first.shape:
                raise ValueError(
                    f"images differ in size: {files[0].path} is {first.shape[2]} x {first.shape[1]}, "
                    f"{files[place].path} is {image.shape[2]} x {image.shape[1]} (width x height): "
                    "set image_size to scale them all"
                )
            pixels[place] = image

    chunk = 256
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(decode, range(0, len(files), chunk)))
    return pixels


def fingerprint(files: list[ImageFile], root: Path, image_size: int | None) -> str:
    """Hash that changes when a file is added, removed, renamed or changed, or the image size is another.

    Args:
        files: The images.
        root: Folder that contains all files.
        image_size: Side in pixels to which they are scaled.
    """
    above = os.path.join(root, "")  # not of the paths below "."
    lines = "\n".join(f"{file.path.removeprefix(above)}\0{file.size}\0{file.modified}" for file in files)
    return hashlib.sha256(f"{image_size}\n{lines}".encode(errors="surrogateescape")).hexdigest()


def default_cache_dir() -> Path:
    """Folder for decoded images: ``PFL_LIGHTNING_CACHE``, or ``pfl_lightning`` in the user's cache folder."""
    if own := os.environ.get("PFL_LIGHTNING_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pfl_lightning"


def _read_cache(cache: Path, listing: str) -> Pixels | None:
    if not cache.is_file():
        return None
    try:
        with np.load(cache, allow_pickle=False) as content:  # an archive, which checks its sums as it is read
            if str(content["listing"]) != listing:
                warnings.warn(f"the images have changed since {cache} was made: decoding them again", stacklevel=2)
                return None
            pixels: Pixels = content["pixels"]
    except Exception as error:  # reading damaged files raises errors of any class
        warnings.warn(f"the cache {cache} is damaged ({error}): decoding the images again", stacklevel=2)
        return None
    return pixels


def _write_cache(cache: Path, pixels: Pixels, listing: str) -> None:
    try:
        for orphan in cache.parent.glob(f".{cache.stem}.*.tmp"):  # of runs that were killed
            if time.time() - orphan.stat().st_mtime > DAY:
                orphan.unlink(missing_ok=True)
        with replace_file(cache, shared=True) as temporary, temporary.open("wb") as file:
            np.savez(file, listing=np.array(listing), pixels=pixels)
    except (OSError, DiskFullError) as error:
        warnings.warn(f"cannot store the decoded images in {cache.parent} ({error}): set cache_dir", stacklevel=2)
        return
    log.info("decoded %d images, stored in %s", len(pixels), cache)


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
            if image.mode == "F" or (image.mode == "I" and image.format not in _SIXTEEN_BITS):
                raise ValueError(
                    "its pixels are floats or 32-bit numbers, of unknown range: convert it to 8 or 16 bits"
                )
            picture = to_bytes(image).convert(_MODES[channels])
    except Exception as error:  # of a damaged file, decoders raise errors of any class
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read the image {path}: {what}; replace or remove the file") from error
    if image_size is not None and picture.size != (image_size, image_size):
        picture = picture.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[np.newaxis] if channels == 1 else pixels.transpose(2, 0, 1)
