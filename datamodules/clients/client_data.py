"""All that one client sees of the data: its parts, and its samples with and without labels as one part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.parts import NO_LABEL, ClientSplit
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.datamodules.clients.views import ClientView, ViewedSplit


@dataclass(frozen=True)
class ClientData:
    """All that one client sees of the data.

    Attributes:
        train: The samples it trains on.
        validation: Samples of its own training data that are set aside; may be empty.
        test: The samples it is judged by, in the proportions of its own training data.
        unlabeled: Further samples without labels, for methods that need none; may be empty.
    """

    train: ClientSplit
    validation: ClientSplit
    test: ClientSplit
    unlabeled: ClientSplit

    @property
    def train_and_unlabeled(self) -> ClientSplit:
        """What a method without labels trains on; samples without a label have the class -1."""
        return JoinedSplit(self.train, self.unlabeled) if len(self.unlabeled) else self.train


class JoinedSplit(ClientSplit):
    """Two parts of one client as one: the samples of the first, then those of the second.

    Args:
        first: A part.
        second: Another one of inputs of the same shape and type, under the same transform.
    """

    def __init__(self, first: ClientSplit, second: ClientSplit) -> None:
        self.indices = torch.cat([first.indices, second.indices])  # each into the samples of its own part
        self.transform = first.transform
        self._joined = (first, second)

    @property
    def targets(self) -> Tensor:
        """Classes of the samples, shape (n,), int64."""
        return torch.cat([part.targets for part in self._joined])

    @property
    def raw_inputs(self) -> Tensor:
        """Stored inputs of the samples, shape (n, ...), as the client sees them."""
        return torch.cat([part.raw_inputs for part in self._joined])

    def select(self, positions: Tensor) -> ClientSplit:
        """Refuse: indices alone do not say of which part they are.

        Raises:
            TypeError: Always.
        """
        raise TypeError("samples with and without labels together cannot be selected from; select from either part")

    def split(self, size: int) -> Iterator[ClientSplit]:
        """Consecutive pieces, of one part after the other.

        Args:
            size: Samples in a piece; the last of each part may have fewer.
        """
        for part in self._joined:
            yield from part.split(size)


def unlabeled_part(inputs: Tensor, indices: Tensor, transform: BatchTransform, view: ClientView) -> ViewedSplit:
    """A client's samples without labels, seen through its view.

    Args:
        inputs: Stored inputs of all such samples, shape (N, ...).
        indices: The client's, shape (n,), int64.
        transform: Normalization and augmentation.
        view: How the client sees its samples; what it says of labels does not apply.
    """
    targets = torch.tensor(NO_LABEL).expand(len(inputs))
    return ViewedSplit(inputs, targets, indices, transform, replace(view, label_map=None))
