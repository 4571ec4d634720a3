"""Image folders with one folder per domain and class: PACS, DomainNet, Office-Home."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.datasets.image_cache import list_folders, list_images
from pfl_lightning.datamodules.datasets.image_folder import CachedImages
from pfl_lightning.datamodules.partition.base import Partitioner

# The ten classes of DomainNet that FedBN and DualFed use.
DOMAINNET_10 = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
CLASS_LISTS = {"domainnet10": DOMAINNET_10}


class DomainFolders(CachedImages):
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
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, root=root, **kwargs)
        _check_names("domains", domains)
        self.domains = domains
        self.classes = _class_list(classes)

    def load(self) -> Samples:
        """List the files, then decode them or read the cache.

        Raises:
            FileNotFoundError: If the folder, a domain or its images are missing.
            ValueError: If domains differ in classes, an image cannot be read, or sizes differ.
        """
        root = Path(self.root)
        domains = find_domains(root, self.domains)
        classes = find_classes({name: list_folders(root / name) for name in domains}, root, self.classes)
        listed = [list_images(root / name, classes)[0] for name in domains]
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
    if not root.is_dir():
        raise FileNotFoundError(
            f"no folder of domains at {str(root)!r}: expected <root>/<domain>/<class>/<image>; extract the data set "
            "there, or set 'root' to where it is"
        )
    there = list_folders(root)
    if not there:
        raise FileNotFoundError(f"no domain folders in {root}: expected {root}/<domain>/<class>/<image>")
    if chosen is None:
        return there
    missing = [name for name in chosen if name not in there]
    if missing:
        raise FileNotFoundError(
            f"no domain {missing[0]!r} in {root}, which has {', '.join(there)}: correct 'domains', which are names of "
            "folders"
        )
    return list(chosen)


def find_classes(folders: Mapping[str, Sequence[str]], root: Path, chosen: Sequence[str] | None) -> list[str]:
    """Names of the classes, sorted, after a check that every domain has them.

    Args:
        folders: The class folders of each domain.
        root: Folder of the domain folders, for errors.
        chosen: The classes to use; None for all, which must be the same in every domain.

    Raises:
        FileNotFoundError: If a domain has no class folders.
        ValueError: If a domain lacks a class or, with ``chosen`` None, has an additional one.

    Example:
        >>> find_classes({"photo": ["dog", "cat"], "sketch": ["cat", "dog"]}, Path("data/pacs"), chosen=None)
        ['cat', 'dog']
    """
    for domain, own in folders.items():
        if not own:
            raise FileNotFoundError(
                f"no class folders in the domain folder {root / domain}: expected {root}/<domain>/<class>/<image>; if "
                f"{domain!r} is no domain, list the domains in 'domains' (a single domain alone is an ImageFolder)"
            )
    held = Counter(name for own in folders.values() for name in own)
    usual = sorted(chosen) if chosen is not None else [name for name in sorted(held) if 2 * held[name] > len(folders)]
    common = [name for name in sorted(held) if held[name] == len(folders)]
    for domain, own in folders.items():
        missing = sorted(set(usual) - set(own))
        extra = sorted(set(own) - set(usual)) if chosen is None else []
        if missing or extra:
            advice = (
                f"set 'classes' to classes that every domain has ({_some(common)})"
                if common
                else "list in 'domains' those that belong together"
            )
            raise ValueError(
                f"the domain {domain!r} in {root} differs in classes from what "
                f"{'most domains have' if chosen is None else 'classes asks for'}: missing {_some(missing)}, extra "
                f"{_some(extra)}; {advice}"
            )
    return usual


def _class_list(classes: list[str] | str | None) -> list[str] | None:
    if isinstance(classes, str):
        if classes not in CLASS_LISTS:
            raise ValueError(f"classes must be a list of names or one of {', '.join(CLASS_LISTS)}, got {classes!r}")
        return list(CLASS_LISTS[classes])
    _check_names("classes", classes)
    return classes


def _check_names(what: str, names: list[str] | None) -> None:
    if names is not None and (not names or len(set(names)) < len(names)):
        raise ValueError(f"{what} must be different names, at least one, or null for all; got {names}")


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"
