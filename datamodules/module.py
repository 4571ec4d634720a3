"""Data module of a federation: one data set, held once, and every client's splits of it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Never
from zlib import crc32

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from pfl_lightning.checks import as_mistaken_data, check_at_least, check_between, check_seed
from pfl_lightning.datamodules.augmentation.geometry import RandomCrop, RandomFlip
from pfl_lightning.datamodules.augmentation.ops import Augmentation, check_augmentable, choose_augmentations
from pfl_lightning.datamodules.clients.batches import BatchTransform, channel_statistics
from pfl_lightning.datamodules.clients.division import Division, check_batches, divide, draw_novel_clients
from pfl_lightning.datamodules.clients.samples import Samples, digest, warn_of_samples, with_public
from pfl_lightning.datamodules.clients.splits import ClientData, ClientSplit
from pfl_lightning.datamodules.counting import Ints, sizes_of
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.datamodules.partition.file import save_partition
from pfl_lightning.names import described, did_you_mean, parameters_of, show_parameters

RECENT = 1000
"""Clients whose views are kept; they take about 3 KB each."""


class FederatedDataModule(LightningDataModule, ABC):
    """Data set divided among clients. A subclass overrides only :meth:`load`.

    The samples are held once, as tensors; a client is an index list. If the data set has a test set, test splits come
    from it alone. If it has none, a stratified share of the whole set is held out for tests before the partition rule
    sees the rest. The loaders are for the Trainer of the federation: a batch is a tensor of client ids, not of samples.

    Unlabeled samples, if the data set has some, are assigned at random (by ``seed``) in equal shares to the clients
    that train. Only self-supervised methods use them, and only for training.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        eval_batch_size: Samples in a validation or test batch.
        validation_share: Share of each client's own training samples that is held out for validation, 0 for none.
        test_share: Share of the whole set that is held out for tests. Used if the data set has no test set and the rule
            does not list test samples (as a file and :class:`Domains` do).
        test_samples_per_client: Greatest size of a client's test split. None for the size of its training data, or,
            with :class:`Domains`, for all samples of its domain that are left.
        augment: Whether training batches are augmented: False for not at all, True for the data set's usual random
            crops and flips, or a list of augmentations, which are applied in this order.
        normalize: Whether the channels of images of unsigned bytes are scaled to mean 0 and deviation 1 by measured
            statistics: of the whole training set without the public samples, or, if the data set has no test set, of
            all clients' training and validation images. Public samples are scaled by the same statistics. Bytes are
            always divided by 255; other inputs are unchanged unless ``mean`` and ``std`` are given.
        mean: Mean of each channel (bytes scaled to [0, 1]), given together with ``std``. Both then apply to any inputs,
            floats included, also with ``normalize=False``. None to measure both, or for no normalization.
        std: Standard deviation of each channel, see ``mean``.
        drop_last: Whether an incomplete last training batch is dropped.
        public: Samples that all clients and the server have, without labels, for methods that train on them: a number
            or a share of the training samples, drawn by ``seed``, which then are no client's; or a folder of images, in
            it or in its subfolders (whose names do not count), scaled to ``image_size`` where the data set has one and
            read with as many channels as the training images (gray or colors). None for those that the data set itself
            names, if any.
        novel_clients: Clients that never train, as a share (rounded up) or a number, drawn by ``seed``. They are
            evaluated (after personalization, if there is one) and reported separately.
        seed: Seed of the validation and test splits. The partition rule has its own seed, and ``seed_everything`` sets
            neither, so that runs with several seeds can share one partition.

    Attributes:
        num_clients: Number of clients m.
        novel: Ids of the clients that never train, ascending.
        participating: Ids of the clients that take part in the training, ascending.
        cohort: Function from the round to the ids of its clients, set by the federation; None for all clients in order.
        eval_clients: Ids of the clients that are evaluated during training, set by the federation; None for all.
        augment: True if training batches are augmented.
        transform: Normalization and augmentation of every client's batches, after :meth:`setup`.
        augmentations: Augmentations of a training batch, in this order. As a class attribute: those that
            ``augment=True`` selects.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        A data set of random vectors:

        >>> import torch
        >>> from pfl_lightning.datamodules import ClassesPerClient, FederatedDataModule, Samples
        >>> class RandomVectors(FederatedDataModule):
        ...     def load(self):
        ...         return Samples(torch.rand(200, 16), torch.arange(200) % 10, tuple("0123456789"))
        >>> data = RandomVectors(ClassesPerClient(num_clients=4, classes_per_client=2), novel_clients=1)
        >>> data.setup()
        >>> data.num_clients, data.num_classes, data.input_shape, data.participating
        (4, 10, (16,), [0, 2, 3])
        >>> splits = data.client_data(0)
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (27, 3, 10)
    """

    augmentations: ClassVar[tuple[Augmentation, ...]] = (RandomCrop(4), RandomFlip())
    read_once: ClassVar[tuple[str, ...]] = ()
    """Attributes that nobody needs once the data are loaded: other processes do not get them."""

    def __init_subclass__(cls, gives: str = "", **options: Any) -> None:
        """Show all arguments in the signature, without the one that a class gives its base itself."""
        super().__init_subclass__(**options)
        show_parameters(cls, gives)

    __repr__ = __str__ = described

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        eval_batch_size: int = 1000,
        validation_share: float = 0.1,
        test_share: float = 0.25,
        test_samples_per_client: int | None = None,
        augment: bool | list[Augmentation] = False,
        normalize: bool = True,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        drop_last: bool = False,
        public: int | float | str | None = None,
        novel_clients: int | float = 0,
        seed: int = 0,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            near = did_you_mean(name, parameters_of(type(self)))
            raise TypeError(f"{type(self).__name__} has no argument {name!r}{near or ', see help()'}")
        super().__init__()
        if not isinstance(partition, Partitioner):
            raise TypeError(f"partition must be a rule, such as IID(num_clients=10), got {partition!r}")
        check_at_least("batch_size", batch_size, 1)
        check_at_least("eval_batch_size", eval_batch_size, 1)
        check_at_least("test_samples_per_client", test_samples_per_client, 1, optional=True)
        check_between("validation_share", validation_share, 0, 1)
        check_between("test_share", test_share, 0, 1)
        check_seed("seed", seed)
        self.partition = partition
        self.num_clients = partition.num_clients
        self.batch_size, self.eval_batch_size, self.drop_last = batch_size, eval_batch_size, drop_last
        self.validation_share, self.test_share = validation_share, test_share
        self.test_samples_per_client = test_samples_per_client
        # The class attribute holds the usual augmentations, the instance attribute the chosen ones.
        self.augmentations = choose_augmentations(augment, type(self).augmentations)  # type: ignore[misc]
        self.augment = len(self.augmentations) > 0
        self.normalize, self.mean, self.std = normalize, mean, std
        self.public, self.seed, self.novel_clients = public, seed, novel_clients
        self.novel = draw_novel_clients(novel_clients, partition.num_clients, seed)
        self.participating = sorted(set(range(partition.num_clients)) - set(self.novel))
        self.cohort: Callable[[int], Sequence[int]] | None = None
        self.eval_clients: Sequence[int] | None = None
        self._public: ClientSplit | None = None
        self._ready: Division | None = None
        self._poison: Callable[[int, ClientData], ClientData] | None = None
        self._recent: dict[int, ClientData] = {}  # made before, of the clients that were asked for last

    @abstractmethod
    def load(self) -> Samples:
        """Read the whole data set into memory; called once, by :meth:`setup`."""

    def setup(self, stage: str | None = None) -> None:
        """Load the data and divide them among the clients; a second call does nothing.

        Args:
            stage: Not used, since every stage has the same data.

        Raises:
            PartitionError: If the partition cannot be met, or a client has no samples or no batch.
            ValueError: If :meth:`load` returns something else, or the public samples are more than there are, or of
                another size than the clients'.
        """
        warn_unless_federated(getattr(self.trainer, "lightning_module", None))
        if self._ready is not None:
            return
        with as_mistaken_data():
            samples = self.load()
            if not isinstance(samples, Samples):
                raise ValueError(f"{type(self).__name__}.load must return Samples, got {type(samples).__name__}")
            if self.public is not None:
                samples = with_public(samples, self.public, self.seed, getattr(self, "image_size", None))
            found = self._divide(samples)
            if self.drop_last:
                check_batches(found, self.batch_size, self.client_names)
            samples = found.samples
            warn_of_samples(
                samples, found.train, found.validation, found.test, found.unlabeled, names=self.client_names
            )
            self.transform = self._transform_of(samples.train_inputs, found.held)
            self._public = found.public(replace(self.transform, augmentations=()))
            self._ready = found

    def read_whole(self) -> None:
        """Hold all samples as tensors, which the package's own methods need; does nothing unless the data are items."""

    def _divide(self, samples: Samples) -> Division:
        return divide(
            self.partition,
            samples,
            validation_share=self.validation_share,
            test_share=self.test_share,
            test_samples_per_client=self.test_samples_per_client,
            seed=self.seed,
            novel=self.novel,
        )

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self._loaded.samples.class_names

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """A name for each client; None where they have only numbers."""
        return self.partition.client_names or None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input; (channels, height, width) for images."""
        return tuple(self._loaded.samples.train_inputs.shape[1:])

    @property
    def input_encoding(self) -> dict[str, Any] | None:
        """Encoding of a table's rows as inputs, in plain values; None where inputs need no encoding."""
        return None

    @property
    def unlabeled_sizes(self) -> Ints | None:
        """Number of unlabeled samples of each client, shape (m,); None if the data set has none."""
        return self._loaded.unlabeled.sizes if self._loaded.samples.num_unlabeled else None

    @property
    def evaluated_sizes(self) -> dict[str, Ints]:
        """Number of validation and of test samples of each client, by part, shape (m,)."""
        return {"validation": sizes_of(self._loaded.validation), "test": sizes_of(self._loaded.test)}

    @property
    def public_split(self) -> ClientSplit | None:
        """Public samples, in their own order, without labels (-1) and never augmented; None if there are none."""
        return self._public

    @property
    def fingerprint(self) -> str:
        """Short hash of the partition: every client's indices and view, and the number of samples.

        A partition read back by :class:`FromFile` has the same fingerprint. The novel clients are part of it: the
        encoder of a checkpoint may have been trained on them; and so are the public samples.
        """
        own = self._loaded.fingerprint
        if self._loaded.samples.public_inputs is not None:
            own = f"{own}-public{crc32(digest(self._loaded.samples.public_inputs)):08x}"
        return f"{own}-{crc32(str(self.novel).encode()):08x}" if self.novel else own

    @property
    def data_fingerprint(self) -> str:
        """Short hash of the data set, however it is divided: shapes, labels, class names and some of the inputs.

        Of items that a data set makes on demand none are read: their number, their labels and the names count.
        """
        return self._loaded.samples.fingerprint

    def class_counts(self) -> Ints:
        """Number of training samples of each class at each client, shape (m, C)."""
        return self._loaded.class_counts()

    @property
    def client_groups(self) -> list[str] | None:
        """Domain, rotation or labels of each client in words, for tables; None if the clients have none of these."""
        return self._loaded.client_groups()

    def client_data(self, client: int) -> ClientData:
        """Splits of one client, made on demand without copying samples; those of the last clients are kept.

        Args:
            client: Id from 0 to m - 1.

        Raises:
            IndexError: If there is no such client.
        """
        found = self._recent.get(client)
        if found is None:
            if not 0 <= client < self.num_clients:
                raise IndexError(f"no client {client}: the partition has clients 0 to {self.num_clients - 1}")
            if len(self._recent) == RECENT:
                del self._recent[next(iter(self._recent))]  # the oldest
            found = self._loaded.client_data(client, self.transform)
            found = self._recent[client] = found if self._poison is None else self._poison(client, found)
        return found

    def poison(self, change: Callable[[int, ClientData], ClientData] | None) -> None:
        """Change clients' samples, to test a federation in which some clients lie; ``None`` ends it.

        Args:
            change: Gives a client's splits, by its number and the splits as they are.
        """
        self._poison, self._recent = change, {}

    def save_partition(self, path: str | Path) -> None:
        """Write every client's indices and view to a file that :class:`FromFile` reads back.

        Args:
            path: The file to write, ``.npz`` or ``.json``.
        """
        own, targets = self._loaded, self._loaded.samples.train_targets.numpy()
        unlabeled = own.unlabeled if own.samples.num_unlabeled else None
        save_partition(path, own.train, own.test, own.validation, own.views, unlabeled, len(targets), targets)

    def train_dataloader(self) -> DataLoader[int]:
        """Loader of the ids of the round's clients, one per batch: tensors of shape (1,)."""
        cohort = self.current_cohort()
        if not cohort:  # an epoch without batches would be none: a batch without clients
            return DataLoader([torch.zeros(0, dtype=torch.int64)], None)  # type: ignore[arg-type]
        return DataLoader(cohort, 1)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[int]:
        """Loader of the ids of the evaluated clients, one per batch: tensors of shape (1,)."""
        return DataLoader(self.evaluated_clients(), 1)  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[int]:
        """Loader of the ids of the evaluated clients, the same as for validation."""
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the numbers of clients on the host; engines bring the clients' own batches to the device."""
        return batch

    def current_cohort(self) -> list[int]:
        """Ids of the current round's clients."""
        if self.cohort is None:
            return self.participating
        round = 0 if self.trainer is None else self.trainer.current_epoch
        return [int(client) for client in self.cohort(round)]

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, without the Trainer, the cohort, and what can be made again."""
        read = dict.fromkeys(self.read_once) if self._ready is not None else {}
        return {**self.__dict__, "trainer": None, "cohort": None, "_recent": {}, **read}

    def evaluated_clients(self) -> list[int]:
        """Ids of the clients that are evaluated, in order."""
        if self.eval_clients is None:
            return list(range(self.num_clients))
        ids = [int(client) for client in self.eval_clients]
        if ids and not 0 <= min(ids) <= max(ids) < self.num_clients:
            raise IndexError(f"eval_clients: {ids} names clients outside 0 to {self.num_clients - 1}")
        return ids

    @property
    def _loaded(self) -> Division:
        if self._ready is None:
            raise RuntimeError(f"{type(self).__name__} has no data yet: call setup() first")
        return self._ready

    def _transform_of(self, inputs: Tensor, held: Ints | None) -> BatchTransform:
        check_augmentable(inputs, self.augmentations)
        mean, std = (None if given is None else tuple(given) for given in (self.mean, self.std))
        if self.normalize and mean is std is None and inputs.dtype == torch.uint8 and inputs.ndim >= 3:
            mean, std = channel_statistics(inputs if held is None else inputs[torch.from_numpy(held)])
        return BatchTransform(mean, std, self.augmentations)


def warn_unless_federated(module: Any) -> None:
    """Warn of a module that is given ids of clients and takes them for samples.

    Args:
        module: The module that is fitted or evaluated, if any.
    """
    if module is not None and not hasattr(module, "client_model"):
        name = type(module).__name__
        warnings.warn(
            f"{name} is not a federation, and the data module's batches are ids of clients: pass what federate "
            f"returns, such as module, data = federate({name}(...), ...) and trainer.fit(module, datamodule=data)",
            stacklevel=3,
        )
