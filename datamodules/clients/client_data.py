"""One client's data: its splits, and its labeled and unlabeled samples as one split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.splits import NO_LABEL, ClientSplit
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.datamodules.clients.views import ClientView, ViewedSplit


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
