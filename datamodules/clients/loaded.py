"""Divided data set: the samples with every client's indices, view and class counts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.client_data import ClientData, unlabeled_split
from pfl_lightning.datamodules.clients.division import Division, IndexLists
from pfl_lightning.datamodules.clients.public import public_split
from pfl_lightning.datamodules.clients.samples import Samples, broken_places
from pfl_lightning.datamodules.clients.splits import ClientSplit
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.datamodules.clients.views import ClientView, ViewedSplit, check_views, describe_views, views_to_bytes
from pfl_lightning.datamodules.counting import Ints, class_counts

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
