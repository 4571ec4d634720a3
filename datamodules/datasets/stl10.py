"""STL-10: few labeled images, many unlabeled ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
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
        if unlabeled is not None:
            check_number("unlabeled", unlabeled)
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
        return Samples(*train, NAMES, *test, unlabeled_inputs=self._read_unlabeled(folder))

    def _read_labeled(self, folder: Path, name: str) -> tuple[Tensor, Tensor]:
        images, classes = _map_images(folder / f"{name}_X.bin"), _read_classes(folder / f"{name}_y.bin")
        if len(images) != len(classes):
            raise _damaged(folder, f"{name}_X.bin has {len(images)} images, {name}_y.bin {len(classes)} classes")
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


def _map_images(path: Path) -> Tensor:
    """Images of a file, shape (N, 3, 96, 96), unsigned bytes, read from the file when they are used."""
    count, rest = divmod(path.stat().st_size, _IMAGE_BYTES)
    if rest or not count:
        raise _damaged(path, f"expected images of {_IMAGE_BYTES} bytes, got {count} and {rest} bytes")
    # A private map ("c"): PyTorch wants memory that may be written to, the file is never changed.
    pixels = np.memmap(path, dtype=np.uint8, mode="c", shape=(count, 3, SIDE, SIDE))
    return torch.from_numpy(pixels).transpose(2, 3)  # the file has one column of an image after the other


def _read_classes(path: Path) -> Tensor:
    numbers = np.fromfile(path, dtype=np.uint8)
    outside = numbers[(numbers < 1) | (numbers > len(NAMES))]
    if len(outside):
        raise _damaged(path, f"classes must be from 1 to {len(NAMES)}, got {outside[0]}")
    return torch.from_numpy(numbers.astype(np.int64) - 1)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is damaged: {what}; download it again, or set 'root' to an intact copy")
