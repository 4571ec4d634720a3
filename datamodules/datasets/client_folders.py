"""Images in folders of clients, with one folder a class in each."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.datasets import images
from pfl_lightning.datamodules.datasets.image_folder import ImageFolder
from pfl_lightning.datamodules.partition.given import AsGiven
from pfl_lightning.options import ImageOptions, Unpack

log = logging.getLogger(__name__)


class ClientFolders(ImageFolder, gives="partition"):
    """Images in ``<root>/<client>/<class>/*``, or in ``<client>/train/<class>/*`` and ``<client>/test/<class>/*``.

    Folders keep their names as the clients' names, sorted. Classes are those of all clients, sorted; a client may lack
    some. Without ``test`` folders, a share of each client's own images (``test_share``) is held out for tests. Hidden
    files and folders are ignored. Images are decoded once and kept in a cache file, as those of :class:`ImageFolder`.

    Args:
        root: Folder of the clients' folders.
        batch_size: Samples in a training batch.
        kwargs: ``image_size``, ``cache_dir``, and what :class:`FederatedDataModule` takes.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it has fewer than two clients, or files beside them.
    """

    def __init__(self, root: str, *, batch_size: int = 50, **kwargs: Unpack[ImageOptions]) -> None:
        layout = "<root>/<client>/<class>/<image>, or train/ and test/ with class folders in each client's folder"
        if not Path(root).is_dir():
            raise FileNotFoundError(f"no folder at {str(root)!r}: expected {layout}; correct 'root'")
        _refuse_files(Path(root), layout)
        names = images.list_folders(Path(root))
        if len(names) < 2:
            raise ValueError(
                f"{root} has {len(names)} client folders ({', '.join(names) or 'none'}), and a federation needs at "
                f"least two clients: expected {layout}"
            )
        super().__init__(AsGiven(len(names), names), batch_size, root=str(root), **kwargs)
        self._folders = names

    def load(self) -> Samples:
        """List the files, then decode them or read the cache.

        Raises:
            FileNotFoundError: If a client has no training images.
            ValueError: If clients' layouts differ, a file is where a folder is expected, or an image cannot be read.
        """
        root = Path(self.root)
        parted = [name for name in self._folders if {"train", "test"} & {*images.list_folders(root / name)}]
        if parted and (whole := [name for name in self._folders if name not in parted]):
            raise ValueError(
                f"clients in {root} differ in layout: {parted[0]} has a folder 'train' or 'test', {whole[0]} does not; "
                "give all clients 'train' and 'test' with class folders, or only class folders"
            )
        found: dict[str, list[tuple[int, str, list[images.ImageFile]]]] = {}
        for part in ("train", "test") if parted else ("",):
            found[part] = []
            for client, name in enumerate(self._folders):
                folder = root / name / part
                if parted:
                    _refuse_files(root / name, "the folders 'train' and 'test'")
                    if further := sorted({*images.list_folders(root / name)} - {"train", "test"}):
                        raise ValueError(
                            f"{root / name} has {further[0]!r} next to 'train' or 'test': move its images into these"
                        )
                if folder.is_dir():
                    _refuse_files(folder, "class folders, with the images in them")
                    listed = [(client, own, images.images_in(folder / own)) for own in images.list_folders(folder)]
                    found[part] += [entry for entry in listed if entry[2]]
                if part != "test" and client not in {owner for owner, _, _ in found[part]}:
                    raise FileNotFoundError(
                        f"client {name!r} has no training images: expected {folder}/<class>/<image>; add some, or "
                        "remove the client's folder"
                    )
        classes = sorted({own for entries in found.values() for _, own, _ in entries})
        trained = {own for part, entries in found.items() if part != "test" for _, own, _ in entries}
        for client, own, _ in found.get("test", []):
            if own not in trained:
                log.warning(
                    "client %s has test images of %r, for which no client has training images: no model can learn it",
                    *(self._folders[client], own),
                )
        parts = [
            [(client, replace(file, label=classes.index(own))) for client, own, files in entries for file in files]
            for entries in found.values()
        ]
        pixels = self.pixels_of([file for part in parts for _, file in part], choice="\0clients")
        targets = [torch.tensor([file.label for _, file in part], dtype=torch.int64) for part in parts]
        owners = [torch.tensor([client for client, _ in part], dtype=torch.int64) for part in parts]
        first = len(parts[0])
        samples = Samples(pixels[:first], targets[0], tuple(classes), train_clients=owners[0])
        if len(parts) == 1 or not parts[1]:
            if parted:
                warnings.warn(
                    f"no client in {root} has images in a folder 'test': a share of {self.test_share:g} (test_share) "
                    "of each client's images is held out for tests",
                    stacklevel=2,
                )
            return samples
        return replace(samples, test_inputs=pixels[first:], test_targets=targets[1], test_clients=owners[1])


def _refuse_files(folder: Path, expected: str) -> None:
    """Say which file is where folders are expected."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir() and not path.name.startswith("."):
            raise ValueError(f"{path} is a file where a folder is expected ({expected}): move or remove it")
