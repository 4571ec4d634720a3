"""Published data sets: scikit-learn's digits; CIFAR, Fashion-MNIST and EMNIST through torchvision; STL-10."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.datamodules.augmentation.geometry import RandomCrop
from pfl_lightning.datamodules.augmentation.ops import Augmentation
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.options import DataOptions, Unpack


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

    published: ClassVar[str]
    """Name of torchvision's class."""

    def __init__(
        self, partition: Partitioner, batch_size: int = 50, *, root: str = "data", **kwargs: Unpack[DataOptions]
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.root = root

    @property
    def options(self) -> dict[str, str]:
        """Options of torchvision's class."""
        return {}

    def load(self) -> Samples:
        """Read the images through torchvision.

        Raises:
            FileNotFoundError: If torchvision finds no data set in the folder.
            ValueError: If a file is damaged.
        """
        import torchvision

        make: Callable[..., Any] = getattr(torchvision.datasets, self.published)
        try:
            train, test = (make(self.root, train=part, download=False, **self.options) for part in (True, False))
            return Samples(*self.tensors(train), tuple(self.names(train)), *self.tensors(test))
        except Exception as error:  # reading damaged files raises errors of any class
            missing = isinstance(error, RuntimeError) and "not found" in str(error)  # or of another checksum, for CIFAR
            raise (FileNotFoundError if missing else ValueError)(
                f"{'no' if missing else 'damaged'} {self.published} under {self.root!r} ({type(error).__name__}: "
                f"{error}); {_how_to_get(self.published, self.root, **self.options)}"
            ) from error

    def names(self, data: Any) -> Sequence[str]:
        """Names of the classes."""
        found: Sequence[str] = data.classes
        return found

    def tensors(self, data: Any) -> tuple[Tensor, Tensor]:
        """Images, shape (N, C, H, W), and classes, shape (N,), of a data set of torchvision."""
        images = torch.as_tensor(data.data)
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(data.targets).long()


def _how_to_get(name: str, root: str, **options: str) -> str:
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return (
        f'nothing is downloaded unasked. Download it once with: python -c "from torchvision.datasets import {name}; '
        f"{name}({root!r}{arguments}, download=True)\" (remove a damaged copy first), or set 'root' to where it is"
    )


class CIFAR10(Torchvision):
    """CIFAR-10: 60,000 color images of 32 x 32 pixels, 10 classes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    published = "CIFAR10"


class CIFAR100(Torchvision):
    """CIFAR-100: 60,000 color images of 32 x 32 pixels, 100 classes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    published = "CIFAR100"


class FashionMNIST(Torchvision):
    """Fashion-MNIST: 70,000 gray images of 28 x 28 pixels, 10 classes.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        root: Folder in which torchvision has stored the data set; nothing is downloaded.
        kwargs: See :class:`FederatedDataModule`.
    """

    published = "FashionMNIST"


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

    published = "EMNIST"
    augmentations: ClassVar[tuple[Augmentation, ...]] = (RandomCrop(4),)  # a mirrored letter is not that letter

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        split: Literal["letters", "byclass"] = "letters",
        **kwargs: Unpack[DataOptions],
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        check_choice("split", split, ("letters", "byclass"))
        self.split = split

    @property
    def options(self) -> dict[str, str]:
        """Options of torchvision's class."""
        return {"split": self.split}

    def names(self, data: Any) -> Sequence[str]:
        """Names of the classes, which count from 0."""
        letters = string.ascii_lowercase
        return letters if self.split == "letters" else string.digits + string.ascii_uppercase + letters

    def tensors(self, data: Any) -> tuple[Tensor, Tensor]:
        """Images, turned upright, and classes."""
        images, classes = super().tensors(data)
        return images.transpose(2, 3).contiguous(), classes - int(self.split == "letters")


SIDE = 96
NAMES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


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
        **kwargs: Unpack[DataOptions],
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        check_number("unlabeled", unlabeled, optional=True)
        check_at_least("image_size", image_size, 1, optional=True)
        self.root, self.unlabeled, self.image_size = root, unlabeled, image_size

    def load(self) -> Samples:
        """Read the images, and the classes from 0.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, or there are fewer images without labels than asked for.
        """
        own = Path(self.root)
        folder = own / "stl10_binary" if (own / "stl10_binary").is_dir() else own
        if not (folder / "train_X.bin").is_file():
            raise FileNotFoundError(f"no STL10 under {self.root!r}: {_how_to_get('STL10', self.root)}")
        train, test = (self._read_labeled(folder, name) for name in ("train", "test"))
        return Samples(*train, NAMES, *test, unlabeled_inputs=None if self.unlabeled == 0 else self._unlabeled(folder))

    def _read_labeled(self, folder: Path, name: str) -> tuple[Tensor, Tensor]:
        images, numbers = _map_images(folder / f"{name}_X.bin"), np.fromfile(folder / f"{name}_y.bin", dtype=np.uint8)
        if len(images) != len(numbers) or numbers.min() < 1 or numbers.max() > len(NAMES):
            raise ValueError(
                f"{folder} is damaged: {name}_y.bin must have a class from 1 to {len(NAMES)} for each of {len(images)} "
                "images; download it again, or set 'root' to an intact copy"
            )
        return resize_images(images, self.image_size or SIDE), torch.from_numpy(numbers.astype(np.int64) - 1)

    def _unlabeled(self, folder: Path) -> Tensor:
        images, count, size = _map_images(folder / "unlabeled_X.bin"), self.unlabeled, self.image_size or SIDE
        count = round(count * len(images)) if isinstance(count, float) else len(images) if count is None else count
        if count > len(images):
            raise ValueError(f"unlabeled is {self.unlabeled}, the file has {len(images)} images: ask for fewer")
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


def _map_images(path: Path) -> Tensor:
    """Images of a file, shape (N, 3, 96, 96), unsigned bytes, read from the file when they are used."""
    count, rest = divmod(path.stat().st_size, 3 * SIDE * SIDE)
    if rest or not count:
        raise ValueError(
            f"{path} is damaged: expected images of {3 * SIDE * SIDE} bytes, got {count} and {rest} bytes; download it "
            "again, or set 'root' to an intact copy"
        )
    # A private map ("c"): PyTorch wants memory that may be written to, the file is never changed.
    pixels = np.memmap(path, dtype=np.uint8, mode="c", shape=(count, 3, SIDE, SIDE))
    return torch.from_numpy(pixels).transpose(2, 3)  # the file has one column of an image after the other
