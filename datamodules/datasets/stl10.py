"""STL-10: few labeled images, many unlabeled ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner

SIDE = 96
NAMES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_IMAGE_BYTES = 3 * SIDE * SIDE


class STL10(FederatedDataModule):
    """STL-10: 5,000 training and 8,000 test images of 10 classes, and 100,000 unlabeled images, 96 x 96 in color.

    Only self-supervised methods (Calibre, PFLSSL, FedEMA) use the unlabeled images, and only for training. At their own
    size they stay in the file, and the operating system reads those that a client needs; other methods read none of
    them. At another ``image_size`` they are held in memory as bytes: 0.3 GB at 32 x 32 pixels. Training a client holds
    a copy of its own images, and as floats (four times as much) where a method processes all of a client's samples
    together, as Calibre does for the divergence rate.

    The binary files are read here, not by ``torchvision.datasets.STL10``, which reads all 3 GB to compare checksums,
    holds all unlabeled images in memory, and refuses a smaller archive in the same format. Instead of checksums, the
    files' sizes, the labels and the numbers of images and labels are checked. The predefined folds of the training set
    are not used.

    Args:
        partition: Rule that assigns the labeled images to clients.
        batch_size: Samples in a training batch.
        root: Folder with ``stl10_binary``, as torchvision stores it; nothing is downloaded.
        unlabeled: Number or share in [0, 1] of the unlabeled images that are used, the first ones of the file; None for
            all.
        image_size: Side in pixels to which images are resized when they are read; None for 96.
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        root: str = "data",
        unlabeled: int | float | None = None,
        image_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        _check_number(unlabeled)
        if image_size is not None:
            check_at_least("image_size", image_size, 1)
        self.root = root
        self.unlabeled = unlabeled
        self.image_size = image_size

    def load(self) -> Samples:
        """Read the images, and the classes from 0.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, or there are fewer images without labels than asked for.
        """
        folder = _find_folder(self.root)
        train, test = (self._read_labeled(folder, name) for name in ("train", "test"))
        return Samples(*train, _class_names(folder), *test, unlabeled_inputs=self._read_unlabeled(folder))

    def _read_labeled(self, folder: Path, name: str) -> tuple[Tensor, Tensor]:
        images, classes = _map_images(folder / f"{name}_X.bin"), _read_classes(folder / f"{name}_y.bin")
        if len(images) != len(classes):
            raise ValueError(
                f"{folder} is damaged: {name}_X.bin has {len(images)} images, {name}_y.bin {len(classes)} classes; "
                f"{_ADVICE}"
            )
        return resize_images(images, self.image_size or SIDE), classes

    def _read_unlabeled(self, folder: Path) -> Tensor | None:
        if self.unlabeled == 0:
            return None
        images = _map_images(folder / "unlabeled_X.bin")
        count = _count(self.unlabeled, len(images))
        size = self.image_size or SIDE
        return images[:count] if size == SIDE else resize_images(images[:count], size)


def resize_images(images: Tensor, size: int, chunk: int = 1024) -> Tensor:
    """Square images of bytes, resized bilinearly with antialiasing.

    Args:
        images: Shape (N, C, H, W), unsigned bytes.
        size: Side in pixels.
        chunk: Images that are resized at a time, which bounds the memory needed.

    Returns:
        New bytes of shape (N, C, size, size), contiguous.

    Example:
        >>> resize_images(torch.full((2, 3, 96, 96), 7, dtype=torch.uint8), size=32).shape
        torch.Size([2, 3, 32, 32])
    """
    resized = torch.empty((*images.shape[:2], size, size), dtype=torch.uint8)
    for source, target in zip(images.split(chunk), resized.split(chunk), strict=True):
        same = source.shape[-2:] == target.shape[-2:]
        target.copy_(source if same else F.interpolate(source, (size, size), mode="bilinear", antialias=True))
    return resized


_ADVICE = "download it again with torchvision, or set 'root' to an intact copy"


def _check_number(unlabeled: int | float | None) -> None:
    valid = unlabeled is None or (isinstance(unlabeled, int | float) and not isinstance(unlabeled, bool))
    share = isinstance(unlabeled, float)
    if not valid or (unlabeled is not None and not 0 <= unlabeled <= (1 if share else math.inf)):
        raise ValueError(
            "unlabeled must be a number of images, a share of them in [0, 1] (a float) or None for all, got "
            f"{unlabeled!r}"
        )


def _count(unlabeled: int | float | None, available: int) -> int:
    if unlabeled is None:
        return available
    count = round(unlabeled * available) if isinstance(unlabeled, float) else unlabeled
    if count > available:
        raise ValueError(f"unlabeled is {unlabeled}, the file has {available} images without labels: ask for fewer")
    return count


def _find_folder(root: str) -> Path:
    for folder in (Path(root) / "stl10_binary", Path(root)):
        if (folder / "train_X.bin").is_file():
            return folder
    raise FileNotFoundError(
        f"no STL10 under {root!r}: expected the folder stl10_binary that torchvision makes there, with train_X.bin and "
        'its like; nothing is downloaded unasked. Get it once with: python -c "from torchvision.datasets import STL10; '
        f"STL10({root!r}, download=True)\", or set 'root' to where it is"
    )


def _check_file(path: Path) -> int:
    """Size of a file in bytes."""
    if not path.is_file():
        raise FileNotFoundError(f"STL10 has no {path.name} in {path.parent}; {_ADVICE}")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty; {_ADVICE}")
    return size


def _map_images(path: Path) -> Tensor:
    """Images of a file, shape (N, 3, 96, 96), unsigned bytes, read from the file when they are used."""
    count, rest = divmod(_check_file(path), _IMAGE_BYTES)
    if rest:
        raise ValueError(
            f"{path} is damaged: its size is no multiple of the {_IMAGE_BYTES} bytes of an image ({count} images and "
            f"{rest} bytes); {_ADVICE}"
        )
    # A private map ("c"): PyTorch wants memory that may be written to, the file is never changed.
    pixels = np.memmap(path, dtype=np.uint8, mode="c", shape=(count, 3, SIDE, SIDE))
    return torch.from_numpy(pixels).transpose(2, 3)  # the file has one column of an image after the other


def _read_classes(path: Path) -> Tensor:
    _check_file(path)
    numbers = np.fromfile(path, dtype=np.uint8)
    if numbers.min() < 1 or numbers.max() > len(NAMES):
        raise ValueError(
            f"{path} is damaged: classes must be from 1 to {len(NAMES)}, got {numbers.min()} to {numbers.max()}; "
            f"{_ADVICE}"
        )
    return torch.from_numpy(numbers.astype(np.int64) - 1)


def _class_names(folder: Path) -> tuple[str, ...]:
    """Class names in the archive's file; the published ones if there is no such file."""
    path = folder / "class_names.txt"
    if not path.is_file():
        return NAMES
    names = tuple(path.read_text(encoding="utf-8").split())
    if len(names) != len(NAMES):
        raise ValueError(f"{path} is damaged: expected {len(NAMES)} names, one a line, got {len(names)}; {_ADVICE}")
    return names
