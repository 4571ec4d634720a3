"""Whole data set as tensors, before it is divided among clients, and the public samples of it or of a folder."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.counting import Ints, Parts
from pfl_lightning.datamodules.datasets.images import decode_images, images_in, list_folders
from pfl_lightning.notices import Names, named_clients
from pfl_lightning.seeding import DataStream

HASHED = 64
"""Inputs that are hashed for a fingerprint."""


@dataclass(frozen=True)
class Samples:
    """Whole data set as tensors, in its own order.

    Attributes:
        train_inputs: Shape (N, ...): images as unsigned bytes (N, C, H, W), or floats of any shape. Bytes of shape
            (N, H, W) are gray images and get their channel.
        train_targets: Classes from 0, shape (N,), int64.
        class_names: A name for each class.
        test_inputs: Published test inputs, shape (M, ...); None if there is no test set.
        test_targets: Classes of the test inputs, shape (M,), int64; None if there is no test set.
        train_domains: Domain of each training sample, from 0, shape (N,), int64; None if there are no domains.
        domain_names: A name for each domain.
        train_clients: Client of each training sample, from 0, shape (N,), int64, where the data say whose it is.
        test_clients: The same of each test sample, shape (M,), int64.
        unlabeled_inputs: Additional inputs without classes, shape (U, ...); None if there are none.
        public_inputs: Inputs without classes that all clients and the server have, shape (P, ...); None if there are
            none.
        public_targets: Their classes, shape (P,), int64, for methods that begin by them; None if they are unknown.

    Raises:
        ValueError: If inputs, targets, class names or domains do not match.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import Samples
        >>> inputs, targets = torch.rand(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> samples = Samples(inputs, targets, class_names=("cat", "dog"), unlabeled_inputs=torch.rand(9, 4))
        >>> samples.num_unlabeled
        9
    """

    train_inputs: Tensor
    train_targets: Tensor
    class_names: tuple[str, ...]
    test_inputs: Tensor | None = None
    test_targets: Tensor | None = None
    train_domains: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    train_clients: Tensor | None = None
    test_clients: Tensor | None = None
    unlabeled_inputs: Tensor | None = None
    public_inputs: Tensor | None = None
    public_targets: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that inputs, targets, class names and domains belong together."""
        if (self.test_inputs is None) != (self.test_targets is None):
            raise ValueError("test_inputs and test_targets must be given together, or neither")
        for name, what in (("train", "training"), ("test", "test"), ("unlabeled", "unlabeled"), ("public", "public")):
            inputs: Any = getattr(self, f"{name}_inputs")
            targets: Any = getattr(self, f"{name}_targets", None)
            if inputs is None:
                continue
            # Gray images of bytes without an axis for channels get one, or their rows would be taken for it.
            if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == 3:
                inputs = inputs.unsqueeze(1)
                object.__setattr__(self, f"{name}_inputs", inputs)
            if name == "train" or targets is not None:
                _check_pairs(what, inputs, targets, len(self.class_names))
            like = self.train_inputs
            if inputs.shape[1:] != like.shape[1:] or inputs.dtype != like.dtype:  # bytes alone are divided by 255
                raise ValueError(
                    f"training inputs are {like.dtype} of shape {tuple(like.shape[1:])}, {what} inputs {inputs.dtype} "
                    f"of shape {tuple(inputs.shape[1:])}: both must be the same"
                )
        if (domains := self.train_domains) is not None:
            fits = domains.shape == self.train_targets.shape and domains.dtype == torch.int64
            if not fits or int(domains.min()) < 0 or int(domains.max()) >= len(self.domain_names):
                raise ValueError(
                    f"train_domains must be int64, one for each of {len(self.train_targets)} samples, from 0 to below "
                    f"the number of domain_names, {len(self.domain_names)}, got {domains}"
                )
        if self.public_inputs is not None and (wrong := len(broken_places(self.public_inputs))):
            raise ValueError(  # of one client's own, that client is left out
                f"{wrong} of {len(self.public_inputs)} public samples hold NaN or infinite numbers: leave them out"
            )

    @property
    def num_unlabeled(self) -> int:
        """Number of unlabeled samples U."""
        return 0 if self.unlabeled_inputs is None else len(self.unlabeled_inputs)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of shapes, class names, all labels, and the inputs at fixed places, 16 hexadecimal digits."""
        hashed = hashlib.sha256(repr(self.class_names).encode())
        for labels in (self.train_targets, self.test_targets, self.train_domains):
            hashed.update(b"none" if labels is None else labels.cpu().numpy().astype("<i8").tobytes())
        for inputs in (self.train_inputs, self.test_inputs, self.unlabeled_inputs):
            hashed.update(b"none" if inputs is None else digest(inputs))
        if self.public_inputs is not None:
            hashed.update(digest(self.public_inputs))
        return hashed.hexdigest()[:16]


def digest(inputs: Tensor) -> bytes:
    """Shape, type, and the items at evenly spaced places, the first and the last among them, as bytes."""
    last, count = max(len(inputs) - 1, 0), min(len(inputs), HASHED)
    places = torch.linspace(0, last, count, dtype=torch.float64).long()
    items = inputs[places].contiguous().cpu()
    content = items.reshape(-1).view(torch.uint8).numpy().tobytes() if items.numel() else b""
    return repr((tuple(inputs.shape), str(inputs.dtype))).encode() + content


def broken_places(inputs: Tensor) -> list[int]:
    """Positions of inputs with values that are not finite, found without a loop over single inputs."""
    found: list[int] = []
    if not inputs.is_floating_point() or not inputs.numel():
        return found
    size = max(1, 2**20 * len(inputs) // inputs.numel())
    for number, piece in enumerate(inputs.split(size)):
        if not piece.sum().isfinite():  # which is faster to see, and also where a sum of finite values is too large
            finite = piece.reshape(len(piece), -1).isfinite().all(dim=1)
            found += (finite.logical_not().nonzero().flatten() + number * size).tolist()
    return found


def warn_of_samples(samples: Samples, *lists: Sequence[Ints], names: Names = None) -> None:
    """Warn of inputs that are not finite, in every part, and of training items of a single class.

    Args:
        samples: The whole data set.
        lists: Every client's training, validation, test and unlabeled indices.
        names: Names of the clients.
    """
    train = samples.train_inputs
    test = train if samples.test_inputs is None else samples.test_inputs
    named = {"training": train, "validation": train, "test": test, "unlabeled": samples.unlabeled_inputs}
    known = {id(inputs): broken_places(inputs) for inputs in named.values() if inputs is not None}
    for (what, inputs), indices in zip(named.items(), lists, strict=True):
        if inputs is None or not (broken := known[id(inputs)]):
            continue
        parts = Parts.of(indices)
        found = np.isin(parts.values, broken)
        if len(clients := np.unique(parts.owners[found])):
            others = f" and {len(clients) - 1} more" if len(clients) > 1 else ""
            first = min(set(parts[int(clients[0])].tolist()) & set(broken))
            warnings.warn(
                f"{what} items of {named_clients(clients[:1].tolist(), names)}{others} have values that are not finite "
                f"({len(broken)} of {len(inputs)} items, the first of this client: item {first}): NaN, infinite, or "
                f"too large for {inputs.dtype}. They are kept unchanged: a client that trains on them may be left out "
                "of the federation, and scores on them mean nothing. Remove or correct these items",
                stacklevel=3,
            )
    classes = samples.train_targets
    if train.dim() > 1 and classes.min() == classes.max():
        warnings.warn(
            f"all {len(classes)} training items have class {int(classes[0])}, so a model that always answers "
            "with it is right: correct the labels, or add items of other classes",
            stacklevel=3,
        )


def _check_pairs(what: str, inputs: Tensor, targets: Tensor, num_classes: int) -> None:
    for name, given in (("inputs", inputs), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise ValueError(
                f"{what} {name} must be a tensor, got a {type(given).__name__}: pass torch.as_tensor(...) of "
                "numbers; classes are numbered from 0"
            )
    if len(inputs) != len(targets) or len(inputs) == 0 or targets.ndim != 1 or targets.dtype != torch.int64:
        raise ValueError(
            f"{what} targets must be int64, one class for each sample, got {targets.dtype} of shape "
            f"{tuple(targets.shape)} for {len(inputs)} inputs; regression, or several labels for a sample, needs "
            "your own LightningModule (federate)"
        )
    wrong = ((targets < 0) | (targets >= num_classes)).nonzero().flatten()
    if len(wrong):
        lowest, highest = int(targets.min()), int(targets.max())
        remedy = "subtract 1 from the labels" if lowest == 1 and highest == num_classes else "correct these labels"
        raise ValueError(
            f"{what} targets must be from 0 to {num_classes - 1}, got {lowest} to {highest}: class_names has "
            f"{num_classes} names, and {len(wrong)} of {len(targets)} targets are outside (the first: item "
            f"{int(wrong[0])}); {remedy}, or name all classes"
        )


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
        >>> from pfl_lightning.datamodules.clients.samples import with_public
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
    domains, clients = samples.train_domains, samples.train_clients
    return replace(
        samples,
        train_inputs=samples.train_inputs[rest],
        train_targets=samples.train_targets[rest],
        train_domains=None if domains is None else domains[rest],
        train_clients=None if clients is None else clients[rest],
        public_inputs=samples.train_inputs[~rest],
        public_targets=samples.train_targets[~rest],
    )


def _read_folder(folder: Path, like: Tensor, image_size: int | None) -> Tensor:
    """Images in a folder and in its subfolders, with the channels of the training images."""
    if like.dim() != 4 or like.dtype != torch.uint8 or like.shape[1] not in (1, 3):
        raise ValueError(
            f"public images in '{folder}' need clients' samples that are byte images with one or three channels, "
            f"got {like.dtype} of shape {tuple(like.shape[1:])}: set 'public' to a number of training "
            "samples to hold back"
        )
    folders = [folder, *(folder / name for name in list_folders(folder))] if folder.is_dir() else []
    files = [file for own in folders for file in images_in(own)]
    if not files:
        raise FileNotFoundError(
            f"no public images in '{folder}': set 'public' to where they are, or to a number of training samples"
        )
    return torch.from_numpy(decode_images(files, image_size, 1 if like.shape[1] == 1 else 3))
