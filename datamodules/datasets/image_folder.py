"""Image folder with one folder per class."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.checks import check_at_least
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.datasets.image_cache import (
    ImageFile,
    default_cache_dir,
    has_images,
    list_folders,
    list_images,
    load_images,
)
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner

log = logging.getLogger(__name__)


class CachedImages(FederatedDataModule):
    """Base of folders of images, which are decoded once.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder of the images.
        image_size: Side in pixels to which every image is scaled; None if all have the same size.
        cache_dir: Folder of the cache; None for ``pfl_lightning`` in the user's cache folder (or what the environment
            variable ``PFL_LIGHTNING_CACHE`` names).
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        root: str,
        image_size: int | None = None,
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        if image_size is not None:
            check_at_least("image_size", image_size, 1)
        self.root = root
        self.image_size = image_size
        self.cache_dir = cache_dir

    def pixels_of(self, files: list[ImageFile], choice: str = "") -> Tensor:
        """The pixels of images, decoded or from the cache.

        Args:
            files: The images.
            choice: What else than the root and the size tells one cache from another.
        """
        cache_dir = default_cache_dir() if self.cache_dir is None else Path(self.cache_dir)
        return torch.from_numpy(load_images(files, Path(self.root), self.image_size, cache_dir, choice))


class ImageFolder(CachedImages):
    """Folder of images with one folder per class: CIFAR-10 as files, CINIC-10, PACS and the like.

    It has ``train/<class>/*`` and ``test/<class>/*``, or ``<class>/*`` alone. Samples are in this order, which the
    indices of a partition file count in: classes sorted by name, files sorted by name. Without a ``test`` folder, a
    share of the images (``test_share``) is held out for tests. A ``valid`` or ``val`` folder next to ``train`` is
    ignored, as every client has its own validation split. Images are decoded once and kept as one array in a cache
    file, which is rebuilt when a file changes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder of the images.
        image_size: Side in pixels to which every image is scaled; None if all have the same size.
        cache_dir: Folder of the cache; None for ``pfl_lightning`` in the user's cache folder (or what the environment
            variable ``PFL_LIGHTNING_CACHE`` names).
        kwargs: See :class:`FederatedDataModule`.
    """

    def load(self) -> Samples:
        """List the files, then decode them or read the cache.

        Raises:
            FileNotFoundError: If the folder, its classes or its images are missing.
            ValueError: If an image cannot be read, sizes differ, or the test set has further classes.
        """
        root = Path(self.root)
        if not root.is_dir():
            raise FileNotFoundError(
                f"no image folder at {self.root!r}: expected <root>/train/<class>/<image> and "
                "<root>/test/<class>/<image>, or <root>/<class>/<image>; extract the data set there, or set 'root' "
                "to where it is"
            )
        train_dir, test_dir = _layout(root)
        files, names = list_images(train_dir)
        num_train = len(files)
        if test_dir is not None:
            files = files + _test_files(test_dir, train_dir, names)
        pixels = self.pixels_of(files)
        targets = torch.tensor([file.label for file in files], dtype=torch.int64)
        if test_dir is None:
            return Samples(pixels, targets, tuple(names))
        return Samples(pixels[:num_train], targets[:num_train], tuple(names), pixels[num_train:], targets[num_train:])


def _test_files(test_dir: Path, train_dir: Path, names: list[str]) -> list[ImageFile]:
    """Test images, with the training classes' numbers; a class may have none."""
    there = [name for name in list_folders(test_dir) if has_images(test_dir / name)]
    if further := sorted(set(there) - set(names)):
        raise ValueError(
            f"training and test set differ in classes: {further} in {test_dir} alone; remove {test_dir / further[0]}, "
            f"or put images of this class into {train_dir / further[0]}"
        )
    if missing := [name for name in names if name not in there]:
        log.warning("%s has no images of %s: accuracies say nothing of these classes", test_dir, ", ".join(missing))
    files, _ = list_images(test_dir, there)
    return [replace(file, label=names.index(there[file.label])) for file in files]


def _layout(root: Path) -> tuple[Path, Path | None]:
    """Folder of the training classes, and of the test classes if there are any."""
    train_dir, test_dir = root / "train", root / "test"
    if not train_dir.is_dir():
        if test_dir.is_dir():
            raise FileNotFoundError(
                f"{root} has a folder 'test' but no folder 'train': expected both, or class folders"
            )
        return root, None
    for name in ("valid", "val", "validation"):
        if (root / name).is_dir():
            log.warning(
                "%s is not used: clients split their validation samples off their own training data", root / name
            )
    if not test_dir.is_dir():
        log.warning("%s has no folder 'test': test samples are split off the training images", root)
        return train_dir, None
    return train_dir, test_dir
