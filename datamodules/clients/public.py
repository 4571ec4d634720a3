"""Public samples, which all clients and the server have: held back from the training samples, or read from a folder."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.clients.splits import NO_LABEL, ClientSplit
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.seeding import DataStream

HOLD_BACK = "give 'public' a number of training samples to hold back"


def with_public(
    samples: Samples, public: int | float | str | Path, seed: int, image_size: int | None = None
) -> Samples:
    """Data set with public samples.

    Args:
        samples: Data set without them.
        public: Number or share of the training samples that is held back, or a folder of images. These get the
            training images' number of channels: gray images three equal ones, and colors become gray by Pillow's
            standard conversion, 0.299 red + 0.587 green + 0.114 blue.
        seed: Seed of the choice.
        image_size: Side to which the images of a folder are scaled; None for as they are.

    Returns:
        The data set with ``public_inputs``. Samples held back are no training samples any more, and the order of the
        others stays.

    Raises:
        ValueError: If none or all training samples would be held back, or the images are of another size than the
            training images, or these are no images of one or three channels.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import Samples
        >>> from pfl_lightning.datamodules.clients.public import with_public
        >>> samples = with_public(Samples(torch.rand(10, 4), torch.arange(10) % 2, ("even", "odd")), 0.3, seed=0)
        >>> len(samples.train_inputs), samples.public_inputs.shape
        (7, torch.Size([3, 4]))
    """
    if isinstance(public, str | Path):
        return replace(samples, public_inputs=_read_folder(Path(public), samples.train_inputs, image_size))
    held = len(samples.train_targets)
    is_share = isinstance(public, float)
    count = int(public) if not is_share else round(public * held) if math.isfinite(public) else 0
    if isinstance(public, bool) or not 1 <= count < held:
        raise ValueError(
            f"public must be a number of the {held} training samples, from 1 to {held - 1}, a share of them between 0 "
            f"and 1, or a folder of images, got {public}"
        )
    chosen = np.random.default_rng([seed, DataStream.PUBLIC]).permutation(held)[:count]
    rest = torch.ones(held, dtype=torch.bool)
    rest[torch.from_numpy(chosen)] = False
    domains = samples.train_domains
    return replace(
        samples,
        train_inputs=samples.train_inputs[rest],
        train_targets=samples.train_targets[rest],
        train_domains=None if domains is None else domains[rest],
        public_inputs=samples.train_inputs[~rest],
        public_targets=samples.train_targets[~rest],
    )


class PublicSplit(ClientSplit):
    """Public samples, whose targets are -1.

    Args:
        inputs: See :class:`ClientSplit`.
        targets: See :class:`ClientSplit`.
        indices: See :class:`ClientSplit`.
        transform: See :class:`ClientSplit`.
        classes: Classes of the whole data set, shape (N,), where they are known; None otherwise.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, indices: Tensor, transform: BatchTransform, classes: Tensor | None = None
    ) -> None:
        super().__init__(inputs, targets, indices, transform)
        self._classes = classes

    @property
    def classes(self) -> Tensor | None:
        """Classes of the samples, shape (n,), for methods that train on them; None for images of a folder."""
        return None if self._classes is None else self._classes.index_select(0, self.indices)


def public_split(samples: Samples, transform: BatchTransform) -> PublicSplit | None:
    """Split of all public samples, as every client sees them; None if there are none."""
    inputs = samples.public_inputs
    if inputs is None:
        return None
    targets = torch.tensor(NO_LABEL).expand(len(inputs))
    plain = replace(transform, augmentations=())
    return PublicSplit(inputs, targets, torch.arange(len(inputs)), plain, samples.public_targets)


def _read_folder(folder: Path, like: Tensor, image_size: int | None) -> Tensor:
    """Images in a folder or in its subfolders, with the channels and of the size of the training images."""
    from pfl_lightning.datamodules.datasets.image_cache import decode_images, has_images, list_folders, list_images

    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder of public images at '{folder}': set 'public' to where it is, or to a number of training samples"
        )
    channels = _channels(folder, like)
    below = list_folders(folder)
    files = list_images(folder)[0] if below else []
    if not below or has_images(folder):
        files = list_images(folder.parent, [folder.name])[0] + files
    images = torch.from_numpy(decode_images(files, image_size, channels))
    (height, width), (own_height, own_width) = images.shape[2:], like.shape[2:]
    if (height, width) != (own_height, own_width):
        raise ValueError(
            f"the public images in '{folder}' are {width} x {height} pixels, the clients' samples {own_width} x "
            f"{own_height} (width x height): one model takes both, so scale the images to {own_width} x {own_height}, "
            f"or {HOLD_BACK}"
        )
    return images


def _channels(folder: Path, like: Tensor) -> Literal[1, 3]:
    """Channels as which the images of a folder are read, those of the training images."""
    if like.dim() != 4:
        raise ValueError(
            f"public images in '{folder}' for clients whose samples have the shape {tuple(like.shape[1:])}: images "
            f"have channels, height and width; {HOLD_BACK}"
        )
    if like.dtype != torch.uint8:
        raise ValueError(
            f"the public images in '{folder}' are bytes, torch.uint8, the clients' samples {like.dtype}: let 'load' "
            f"give its images as bytes, or {HOLD_BACK}"
        )
    if like.shape[1] == 1:
        return 1
    if like.shape[1] == 3:
        return 3
    raise ValueError(
        f"the public images in '{folder}' can be read as gray, one channel, or as colors, three channels, but the "
        f"clients' samples have {like.shape[1]} channels: {HOLD_BACK}"
    )
