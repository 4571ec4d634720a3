"""Published data sets: the digits of scikit-learn, and CIFAR, Fashion-MNIST and EMNIST through torchvision."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.augmentation.geometry import RandomCrop
from pfl_lightning.datamodules.augmentation.ops import Augmentation
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner


class Digits(FederatedDataModule):
    """The 1,797 handwritten digits of scikit-learn: 8 x 8 pixels, ten classes, no download, no test set.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        kwargs: See :class:`FederatedDataModule`.

    Example:
        >>> from pfl_lightning.datamodules import ClassesPerClient, Digits
        >>> data = Digits(ClassesPerClient(num_clients=10, classes_per_client=3), augment=True)
        >>> data.setup()
        >>> data.class_counts().shape, (data.class_counts() > 0).sum(axis=1).tolist()
        ((10, 10), [3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    """

    augmentations: ClassVar[tuple[Augmentation, ...]] = (RandomCrop(1),)  # a mirrored digit is not a digit

    def load(self) -> Samples:
        """Read the digits, with gray values 0 to 16 scaled to 0 to 255."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
        return Samples(images, torch.from_numpy(digits.target.astype(np.int64)), tuple(string.digits))


class Torchvision(FederatedDataModule):
    """Base of the data sets that torchvision reads.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(self, partition: Partitioner, batch_size: int = 50, *, root: str = "data", **kwargs: Any) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.root = root


class CIFAR10(Torchvision):
    """CIFAR-10: 60,000 color images of 32 x 32 pixels, 10 classes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    def load(self) -> Samples:
        """Read the images through torchvision.

        Raises:
            FileNotFoundError: If torchvision finds no data set in the folder.
            ValueError: If a file is damaged.
        """
        return _load_cifar("CIFAR10", self.root)


class CIFAR100(Torchvision):
    """CIFAR-100: 60,000 color images of 32 x 32 pixels, 100 classes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    def load(self) -> Samples:
        """Read the images through torchvision.

        Raises:
            FileNotFoundError: If torchvision finds no data set in the folder.
            ValueError: If a file is damaged.
        """
        return _load_cifar("CIFAR100", self.root)


class FashionMNIST(Torchvision):
    """Fashion-MNIST: 70,000 gray images of 28 x 28 pixels, 10 classes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    def load(self) -> Samples:
        """Read the images through torchvision.

        Raises:
            FileNotFoundError: If torchvision finds no data set in the folder.
            ValueError: If a file is damaged.
        """
        with _open("FashionMNIST", self.root) as (train, test):
            pairs = [(data.data.unsqueeze(1), data.targets.long()) for data in (train, test)]
            return Samples(*pairs[0], tuple(train.classes), *pairs[1])


class EMNIST(Torchvision):
    """EMNIST: gray images of 28 x 28 pixels of handwritten letters (26 classes) or letters and digits (62).

    The images stand upright (the published files hold them transposed), and letters count from 0.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        split: ``letters`` (upper and lower case as one) or ``byclass`` (digits, upper case, lower case).
        kwargs: See :class:`FederatedDataModule`.
    """

    augmentations: ClassVar[tuple[Augmentation, ...]] = (RandomCrop(4),)  # a mirrored letter is not that letter

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        split: Literal["letters", "byclass"] = "letters",
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        if split not in ("letters", "byclass"):
            raise ValueError(f"split must be 'letters' or 'byclass', got {split!r}")
        self.split = split

    def load(self) -> Samples:
        """Read the images through torchvision and turn them upright.

        Raises:
            FileNotFoundError: If torchvision finds no data set in the folder.
            ValueError: If a file is damaged.
        """
        first = 1 if self.split == "letters" else 0
        names = string.ascii_lowercase if first else string.digits + string.ascii_uppercase + string.ascii_lowercase
        with _open("EMNIST", self.root, split=self.split) as parts:
            upright = [data.data.transpose(1, 2).contiguous().unsqueeze(1) for data in parts]
            train, test = zip(upright, (data.targets.long() - first for data in parts), strict=True)
            return Samples(*train, tuple(names), *test)


def _load_cifar(name: str, root: str) -> Samples:
    with _open(name, root) as (train, test):

        def tensors(data: Any) -> tuple[Tensor, Tensor]:
            images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
            return images, torch.tensor(data.targets, dtype=torch.int64)

        return Samples(*tensors(train), tuple(train.classes), *tensors(test))


@contextmanager
def _open(name: str, root: str, **options: str) -> Iterator[tuple[Any, Any]]:
    """Training and test set of torchvision; what is wrong with them becomes an error that says where and what to do."""
    import torchvision

    make: Callable[..., Any] = getattr(torchvision.datasets, name)
    try:
        yield tuple(make(root, train=train, download=False, **options) for train in (True, False))  # type: ignore[misc]
    except Exception as error:  # reading damaged files raises errors of any class
        missing = isinstance(error, RuntimeError) and "not found" in str(error)  # or of another checksum, for CIFAR
        arguments = "".join(f", {key}={value!r}" for key, value in options.items())
        raise (FileNotFoundError if missing else ValueError)(
            f"{'no' if missing else 'damaged'} {name} under {root!r} ({type(error).__name__}: {error}); nothing is "
            f'downloaded unasked. Get it once with: python -c "from torchvision.datasets import {name}; '
            f"{name}({root!r}{arguments}, download=True)\", without a damaged copy there, or set 'root' to where it is"
        ) from error
