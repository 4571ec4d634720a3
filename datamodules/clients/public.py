"""Public samples, which all clients and the server have: held back from the training samples, or read from a folder."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.datasets.image_cache import decode_images, images_in, list_folders
from pfl_lightning.seeding import DataStream


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


def _read_folder(folder: Path, like: Tensor, image_size: int | None) -> Tensor:
    """Images in a folder and in its subfolders, with the channels of the training images."""
    if like.dim() != 4 or like.dtype != torch.uint8 or like.shape[1] not in (1, 3):
        raise ValueError(
            f"the public images in '{folder}' need clients' samples that are images of bytes with one or three "
            f"channels, these are {like.dtype} of shape {tuple(like.shape[1:])}: give 'public' a number of training "
            "samples to hold back"
        )
    folders = [folder, *(folder / name for name in list_folders(folder))] if folder.is_dir() else []
    files = [file for own in folders for file in images_in(own)]
    if not files:
        raise FileNotFoundError(
            f"no public images in '{folder}': set 'public' to where they are, or to a number of training samples"
        )
    return torch.from_numpy(decode_images(files, image_size, 1 if like.shape[1] == 1 else 3))
