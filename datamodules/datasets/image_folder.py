"""Images in folders: one folder a class, and one folder a domain with one a class in it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pfl_lightning.checks import check_at_least
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.datasets import images
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.notices import few_of
from pfl_lightning.options import DataOptions, ImageOptions, Unpack

log = logging.getLogger(__name__)


class ImageFolder(FederatedDataModule):
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

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        root: str,
        image_size: int | None = None,
        cache_dir: str | None = None,
        **kwargs: Unpack[DataOptions],
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        check_at_least("image_size", image_size, 1, optional=True)
        self.root, self.image_size, self.cache_dir = root, image_size, cache_dir

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
        files, names = images.list_images(train_dir)
        num_train = len(files)
        if test_dir is not None:
            files = files + _test_files(test_dir, train_dir, names)
        pixels = self.pixels_of(files)
        targets = torch.tensor([file.label for file in files], dtype=torch.int64)
        if test_dir is None:
            return Samples(pixels, targets, tuple(names))
        return Samples(pixels[:num_train], targets[:num_train], tuple(names), pixels[num_train:], targets[num_train:])

    def pixels_of(self, files: list[images.ImageFile], choice: str = "") -> Tensor:
        """The pixels of images, decoded or from the cache.

        Args:
            files: The images.
            choice: What else than the root and the size tells one cache from another.
        """
        cache_dir = images.default_cache_dir() if self.cache_dir is None else Path(self.cache_dir)
        return torch.from_numpy(images.load_images(files, Path(self.root), self.image_size, cache_dir, choice))


def _test_files(test_dir: Path, train_dir: Path, names: list[str]) -> list[images.ImageFile]:
    """Test images, with the training classes' numbers; a class may have none."""
    there = [name for name in images.list_folders(test_dir) if images.images_in(test_dir / name)]
    if further := sorted(set(there) - set(names)):
        raise ValueError(
            f"training and test set differ in classes: {further} only in {test_dir}; remove {test_dir / further[0]}, "
            f"or put images of this class into {train_dir / further[0]}"
        )
    if missing := [name for name in names if name not in there]:
        log.warning("%s has no images of %s: accuracies say nothing about these classes", test_dir, ", ".join(missing))
    files, _ = images.list_images(test_dir, there)
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
    for folder in (root / name for name in ("valid", "val", "validation")):
        if folder.is_dir():
            log.warning("%s is not used: clients take their validation samples from their own training data", folder)
    if not test_dir.is_dir():
        log.warning("%s has no folder 'test': test samples are taken from the training images", root)
    return train_dir, test_dir if test_dir.is_dir() else None


# The ten classes of DomainNet that FedBN and DualFed use.
DOMAINNET_10 = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)


class DomainFolders(ImageFolder):
    """Images in ``<root>/<domain>/<class>/*``, every domain with the same classes: PACS, DomainNet, Office-Home.

    The rule :class:`Domains` gives every client images of one domain and tests it on the rest of that domain. Any other
    rule divides all images, whatever their domain, as for a data set without a test set. Samples are in this order,
    which the indices of a partition file count in: domains as given, classes sorted by name, files sorted by name.
    Images are decoded once and kept as one array in a cache file, which is rebuilt when a file changes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder of the domain folders.
        domains: The domain folders to use, in this order, which is also that of the clients; None for all, sorted.
        classes: The classes to use, numbered in the order of their names, or ``domainnet10`` for the ten classes of
            DomainNet that the literature uses. None for all, which must then be the same in every domain.
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
        domains: list[str] | None = None,
        classes: list[str] | str | None = None,
        **kwargs: Unpack[ImageOptions],
    ) -> None:
        super().__init__(partition, batch_size, root=root, **kwargs)
        classes = list(DOMAINNET_10) if classes == "domainnet10" else classes
        for what, names in (("domains", domains), ("classes", classes)):
            if isinstance(names, str) or (names is not None and (not names or len(set(names)) < len(names))):
                raise ValueError(
                    f"{what} must be a list of different names, at least one, or null for all (classes may be "
                    f"'domainnet10'), got {names!r}"
                )
        self.domains, self.classes = domains, classes

    def load(self) -> Samples:
        """List the files, then decode them or read the cache.

        Raises:
            FileNotFoundError: If the folder, a domain, its classes or its images are missing.
            ValueError: If domains differ in classes, an image cannot be read, or sizes differ.
        """
        root = Path(self.root)
        domains = find_domains(root, self.domains)
        classes = find_classes({name: images.list_folders(root / name) for name in domains}, root, self.classes)
        listed = [images.list_images(root / name, classes)[0] for name in domains]
        files = [file for own in listed for file in own]
        return Samples(
            self.pixels_of(files, choice=f"\0domains {domains} {classes}"),
            torch.tensor([file.label for file in files], dtype=torch.int64),
            tuple(classes),
            train_domains=torch.repeat_interleave(torch.tensor([len(own) for own in listed])),
            domain_names=tuple(domains),
        )


def find_domains(root: Path, chosen: Sequence[str] | None) -> list[str]:
    """Names of the domain folders.

    Args:
        root: Folder of the domain folders.
        chosen: The domains to use; None for all, sorted.

    Raises:
        FileNotFoundError: If there are none, or a chosen one is missing.
    """
    there = images.list_folders(root) if root.is_dir() else []
    missing = [name for name in chosen or [] if name not in there]
    if missing or not there:
        raise FileNotFoundError(
            f"no domain {repr(missing[0]) if missing else 'folders'} in '{root}', which has {_some(there)}: expected "
            "<root>/<domain>/<class>/<image>; set 'root' to where the data set is, or correct 'domains', which are "
            "names of folders"
        )
    return there if chosen is None else list(chosen)


def find_classes(folders: Mapping[str, Sequence[str]], root: Path, chosen: Sequence[str] | None) -> list[str]:
    """Names of the classes, sorted, after a check that every domain has them.

    Args:
        folders: The class folders of each domain.
        root: Folder of the domain folders, for errors.
        chosen: The classes to use; None for all, which must be the same in every domain.

    Raises:
        ValueError: If a domain lacks a class or, with ``chosen`` None, has an additional one.

    Example:
        >>> find_classes({"photo": ["dog", "cat"], "sketch": ["cat", "dog"]}, Path("data/pacs"), chosen=None)
        ['cat', 'dog']
    """
    held = Counter(name for own in folders.values() for name in own)
    usual = sorted(chosen) if chosen is not None else [name for name in sorted(held) if 2 * held[name] > len(folders)]
    for domain, own in folders.items():
        missing, extra = sorted(set(usual) - set(own)), sorted(set(own) - set(usual)) if chosen is None else []
        if missing or extra:
            common = [name for name in sorted(held) if held[name] == len(folders)]
            raise ValueError(
                f"the domain {domain!r} in {root} has other classes than "
                f"{'most domains' if chosen is None else 'those asked for'}: missing {_some(missing)}, extra "
                f"{_some(extra)}; set 'classes' to classes that every domain has ({_some(common)}), or 'domains' to "
                "folders that belong together"
            )
    return usual


def _some(names: Sequence[str]) -> str:
    return few_of(names, 8) or "none"
