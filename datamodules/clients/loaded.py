"""Divided data set: the samples with all clients' indices and views, what one client has of them, who never trains."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pfl_lightning.datamodules.clients.batches import BatchTransform
from pfl_lightning.datamodules.clients.division import Division
from pfl_lightning.datamodules.clients.samples import Samples, broken_places
from pfl_lightning.datamodules.clients.splits import NO_LABEL, ClientSplit, JoinedSplit, PublicSplit
from pfl_lightning.datamodules.clients.views import ClientView, check_views, describe_views, views_to_bytes
from pfl_lightning.datamodules.counting import Ints, class_counts
from pfl_lightning.seeding import DataStream


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
        inputs, plain = self.samples.public_inputs, replace(self.transform, augmentations=())
        if inputs is None:
            return None
        targets = torch.tensor(NO_LABEL).expand(len(inputs))
        return PublicSplit(inputs, targets, torch.arange(len(inputs)), plain, self.samples.public_targets)

    def client_data(self, client: int) -> ClientData:
        """Splits of one client, through its view."""
        samples, division, view = self.samples, self.division, self.views[client]
        inputs, targets = samples.train_inputs, samples.train_targets
        test_inputs = inputs if samples.test_inputs is None else samples.test_inputs
        test_targets = targets if samples.test_targets is None else samples.test_targets
        none = torch.empty((0, *inputs.shape[1:]), dtype=inputs.dtype)
        unlabeled = none if samples.unlabeled_inputs is None else samples.unlabeled_inputs
        no_labels = torch.tensor(NO_LABEL).expand(len(unlabeled))
        seen = None if view.is_identity else view
        turned = ClientView(view.rotation) if view.rotation else None
        return ClientData(
            train=ClientSplit(inputs, targets, division.train[client], self.transform, seen),
            validation=ClientSplit(inputs, targets, division.validation[client], self.transform, seen),
            test=ClientSplit(test_inputs, test_targets, division.test[client], self.transform, seen),
            unlabeled=ClientSplit(unlabeled, no_labels, division.unlabeled[client], self.transform, turned),
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
    train = samples.train_inputs
    test = train if samples.test_inputs is None else samples.test_inputs
    for what, inputs, lists in (
        ("training", train, division.train),
        ("validation", train, division.validation),
        ("test", test, division.test),
        ("unlabeled", samples.unlabeled_inputs, division.unlabeled),
    ):
        if inputs is None or not (broken := broken_places(inputs)):
            continue
        found = [np.intersect1d(own, broken) for own in lists.arrays()]
        if clients := [client for client, own in enumerate(found) if len(own)]:
            others = f" and {len(clients) - 1} more" if len(clients) > 1 else ""
            warnings.warn(
                f"{what} items of client {clients[0]}{others} have values that are not finite ({len(broken)} of "
                f"{len(inputs)} items, the first of this client: item {found[clients[0]][0]}): NaN, infinite, or too "
                f"large for {inputs.dtype}. They are kept unchanged: a client that trains on them may be left out of "
                "the federation, and scores on them mean nothing. Remove or correct these items",
                stacklevel=4,
            )
    classes = samples.train_targets.unique()
    if len(classes) == 1 and train.dim() > 1:
        warnings.warn(
            f"all {len(samples.train_targets)} training items have class {int(classes)}, so that any model that always "
            "answers with it is right: correct the labels, or give items of other classes",
            stacklevel=4,
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
