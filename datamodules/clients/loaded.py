"""Divided data set: the samples with all clients' indices and views, what one client has of them, who never trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.division import Division, IndexLists
from pfl_lightning.datamodules.clients.public import public_split
from pfl_lightning.datamodules.clients.samples import Samples, broken_places
from pfl_lightning.datamodules.clients.splits import NO_LABEL, ClientSplit
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.datamodules.clients.views import ClientView, ViewedSplit, check_views, describe_views, views_to_bytes
from pfl_lightning.datamodules.counting import Ints, class_counts
from pfl_lightning.seeding import DataStream

__all__ = ["warn_of_samples"]


@dataclass(frozen=True)
class LoadedData:
    """Samples of a data set with every client's indices and view.

    Attributes:
        samples: The whole data set.
        division: Indices of every client's splits.
        transform: Normalization and augmentation of every client's batches.
        views: View of each client.

    Raises:
        ValueError: If a view does not fit the inputs.
    """

    samples: Samples
    division: Division
    transform: BatchTransform
    views: tuple[ClientView, ...]

    def __post_init__(self) -> None:
        """Check that the views suit the inputs."""
        check_views(self.views, self.samples.train_inputs.shape[1:])

    @property
    def fingerprint(self) -> str:
        """Hash of every client's indices and view, 16 hexadecimal digits."""
        samples = self.samples
        num_test = 0 if samples.test_targets is None else len(samples.test_targets)
        num_samples = (len(samples.train_targets), num_test, samples.num_unlabeled)
        return self.division.fingerprint(*num_samples, views_to_bytes(self.views))

    @cached_property
    def public(self) -> ClientSplit | None:
        """Public samples, the same object for all clients; None if there are none."""
        return public_split(self.samples, self.transform)

    def client_data(self, client: int) -> ClientData:
        """Splits of one client, through its view."""
        samples, division, view = self.samples, self.division, self.views[client]
        inputs, targets = samples.train_inputs, samples.train_targets
        test_inputs = inputs if samples.test_inputs is None else samples.test_inputs
        test_targets = targets if samples.test_targets is None else samples.test_targets
        # Most clients see the samples as they are stored: their parts need no view in between.
        split = ClientSplit if view.is_identity else partial(ViewedSplit, view=view)
        none = torch.empty((0, *inputs.shape[1:]), dtype=inputs.dtype)
        unlabeled = none if samples.unlabeled_inputs is None else samples.unlabeled_inputs
        return ClientData(
            train=split(inputs, targets, division.train[client], self.transform),
            validation=split(inputs, targets, division.validation[client], self.transform),
            test=split(test_inputs, test_targets, division.test[client], self.transform),
            unlabeled=unlabeled_split(unlabeled, division.unlabeled[client], self.transform, view),
        )

    def class_counts(self) -> Ints:
        """Training samples of each class at each client, as the client sees them, shape (m, C)."""
        labels, num_classes = self.samples.train_targets.numpy(), len(self.samples.class_names)
        stored = class_counts(labels, self.division.train.arrays(), num_classes)
        return np.stack([view.counts(row) for view, row in zip(self.views, stored, strict=True)])

    def client_groups(self) -> list[str] | None:
        """Domain and view of each client in words; None if the clients have neither."""
        domains, views = self._client_domains(), describe_views(self.views)
        if domains is None:
            return views if any(views) else None
        return [", ".join(filter(None, both)) for both in zip(domains, views, strict=True)]

    def _client_domains(self) -> list[str] | None:
        """Domain of each client; None unless every client's training samples come from a single domain."""
        if self.samples.train_domains is None:
            return None
        held = [np.unique(self.samples.train_domains.numpy()[indices]) for indices in self.division.train.arrays()]
        return [self.samples.domain_names[own[0]] for own in held] if all(len(own) == 1 for own in held) else None


def warn_of_samples(samples: Samples, division: Division) -> None:
    """Warn of inputs that are not finite, in every part, and of training items of a single class.

    Args:
        samples: The whole data set.
        division: Every client's indices.
    """
    test = samples.train_inputs if samples.test_inputs is None else samples.test_inputs
    trained, scored = (
        "a client that trains on them may be left out of the federation",
        "the scores on them mean nothing",
    )
    for what, inputs, lists, then in (
        ("training", samples.train_inputs, division.train, trained),
        ("validation", samples.train_inputs, division.validation, scored),
        ("test", test, division.test, scored),
        ("unlabeled", samples.unlabeled_inputs, division.unlabeled, trained),
    ):
        if inputs is not None:
            _warn_of_broken(what, inputs, lists, then)
    found = samples.train_targets.unique()
    if len(found) == 1 and samples.train_inputs.dim() > 1:
        warnings.warn(
            f"all {len(samples.train_targets)} training items have class {int(found)}, so that any model that always "
            "answers with it is right: correct the labels, or give items of other classes",
            stacklevel=4,
        )


def _warn_of_broken(what: str, inputs: Tensor, lists: IndexLists, then: str) -> None:
    broken = broken_places(inputs)
    clients = [client for client in range(len(lists)) if np.isin(lists[client].numpy(), broken).any()] if broken else []
    if clients:
        own = np.intersect1d(lists[clients[0]].numpy(), broken)
        others = f" and {len(clients) - 1} more" if len(clients) > 1 else ""
        warnings.warn(
            f"{what} items of client {clients[0]}{others} have values that are not finite ({len(broken)} of "
            f"{len(inputs)} items, the first of this client: item {own[0]}): NaN, infinite, or too large for "
            f"{inputs.dtype}. They are kept unchanged; {then}. Remove or correct these items",
            stacklevel=5,
        )


@dataclass(frozen=True)
class ClientData:
    """Splits of one client.

    Attributes:
        train: Training samples.
        validation: Samples held out from the client's own training data; may be empty.
        test: Test samples, in the class proportions of the client's own training data.
        unlabeled: Additional samples without labels, for self-supervised methods; may be empty.
    """

    train: ClientSplit
    validation: ClientSplit
    test: ClientSplit
    unlabeled: ClientSplit

    @property
    def train_and_unlabeled(self) -> ClientSplit:
        """Training split of a self-supervised method; unlabeled samples have the class -1."""
        return JoinedSplit(self.train, self.unlabeled) if len(self.unlabeled) else self.train


class JoinedSplit(ClientSplit):
    """Two splits of one client as one: the samples of the first, then those of the second.

    Args:
        first: A split.
        second: A split with inputs of the same shape and dtype, and the same transform.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import BatchTransform, ClientSplit
        >>> labeled = ClientSplit(torch.rand(2, 4), torch.tensor([3, 5]), torch.arange(2), BatchTransform())
        >>> unlabeled = ClientSplit(torch.rand(1, 4), torch.tensor([-1]), torch.arange(1), BatchTransform())
        >>> both = JoinedSplit(labeled, unlabeled)
        >>> both.targets.tolist(), both.raw_inputs.shape
        ([3, 5, -1], torch.Size([3, 4]))
    """

    def __init__(self, first: ClientSplit, second: ClientSplit) -> None:
        self.indices = torch.cat([first.indices, second.indices])  # each into the stored samples of its split
        self.transform = first.transform
        self._joined = (first, second)

    @property
    def targets(self) -> Tensor:
        """Classes of the samples, shape (n,), int64."""
        return torch.cat([split.targets for split in self._joined])

    @property
    def raw_inputs(self) -> Tensor:
        """Stored inputs of the samples, shape (n, ...), as the client sees them."""
        return torch.cat([split.raw_inputs for split in self._joined])

    def select(self, positions: Tensor) -> ClientSplit:
        """Refuse, since positions alone do not identify the split.

        Raises:
            TypeError: Always.
        """
        raise TypeError("cannot select from labeled and unlabeled samples together: select from one of the two splits")

    def split(self, size: int) -> Iterator[ClientSplit]:
        """Consecutive pieces, first of one split, then of the other.

        Args:
            size: Samples in a piece; the last of each split may have fewer.
        """
        for split in self._joined:
            yield from split.split(size)


def unlabeled_split(inputs: Tensor, indices: Tensor, transform: BatchTransform, view: ClientView) -> ViewedSplit:
    """Split of a client's unlabeled samples, seen through its view.

    Args:
        inputs: Stored inputs of all unlabeled samples, shape (N, ...).
        indices: The client's samples, shape (n,), int64.
        transform: Normalization and augmentation.
        view: The client's view of its samples; its label map is ignored.
    """
    targets = torch.tensor(NO_LABEL).expand(len(inputs))
    return ViewedSplit(inputs, targets, indices, transform, replace(view, label_map=None))


def draw_novel_clients(novel: int | float, num_clients: int, seed: int) -> list[int]:
    """Ids of the novel clients, which never train.

    Args:
        novel: A share of all clients in [0, 1), rounded up, or a number of clients.
        num_clients: Number of clients m.
        seed: Seed of the draw.

    Returns:
        Ascending ids.

    Raises:
        ValueError: If ``novel`` is neither, or no client would be left to train.

    Example:
        >>> draw_novel_clients(0.25, num_clients=10, seed=0)  # 2.5 clients, rounded up
        [3, 5, 8]
        >>> draw_novel_clients(0, num_clients=10, seed=0)
        []
    """
    share = isinstance(novel, float)
    if isinstance(novel, bool) or not isinstance(novel, int | float) or novel < 0 or (share and not novel < 1):
        raise ValueError(f"novel_clients must be a share in [0, 1) or a number of clients, got {novel!r}")
    number = math.ceil(novel * num_clients - 1e-9) if share else int(novel)
    if number >= num_clients > 0:
        raise ValueError(
            f"novel_clients is {novel!r}: all of the {num_clients} clients would be novel and none would be left to "
            f"train; give at most {num_clients - 1}"
        )
    rng = np.random.default_rng([seed, DataStream.NOVEL])
    return sorted(rng.choice(num_clients, number, replace=False).tolist())


def warn_unless_federated(module: Any) -> None:
    """Warn of a module that is given ids of clients and takes them for samples.

    Args:
        module: The module that is fitted or evaluated, if any.
    """
    if module is not None and not hasattr(module, "client_model"):
        name = type(module).__name__
        warnings.warn(
            f"the Trainer has a {name}, which is no federation, with the data of one, whose batches are ids of "
            f"clients: give it what federate gives back, such as module, data = federate({name}(...), ...) and "
            "trainer.fit(module, datamodule=data)",
            stacklevel=3,
        )
