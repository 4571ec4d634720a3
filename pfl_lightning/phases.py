"""Phases of a local fit, and the adaptation of a trained model to a client's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from pfl_lightning.checks import check_at_least, check_choice, check_learning_rate, check_number

__all__ = ["Personalization", "Phase"]


Trained = Literal["linear", "linear+encoder", "head", "all", "nothing"]
Source = Literal["own", "public"]


@dataclass(frozen=True)
class Phase:
    """Part of a local fit in which named parameters train and the rest is frozen.

    Attributes:
        name: Name in messages; nothing depends on it.
        train: Patterns of the parameter names that train, such as ``("head.*",)``.
        epochs: Passes over the client's training data.
        lr: Learning rate; ``None`` keeps what ``configure_optimizers`` says.
        batch_size: Samples in a batch; ``None`` keeps what the data module says.
        plain: Whether batches are single views without augmentation, incomplete last ones included, whatever the data
            module and the method say; but a last batch of a single sample is left out where batch normalization trains,
            which cannot take it.
        optimizer: Makes the optimizer from the trainable parameters; ``None`` keeps the client's.
        losses: Names of the loss terms that are summed; ``None`` for the client's ``loss_names``.
        batch_statistics: Whether batch normalization of the parts that do not train goes on as in training: it
            normalizes by the batch and moves its running statistics. Otherwise frozen means frozen.
        smallest_batch: Samples that a batch must have: an incomplete last batch of fewer is left out, unless it is the
            only one. The order being random, it is other samples in every epoch.
        source: Whose samples it trains on: the client's ``"own"``, or the ``"public"`` ones of the round, which have no
            labels (-1) and always come in plain batches; what a method attaches to them is its target.
        lr_share: What the learning rate is multiplied by, whoever says it; ``None`` keeps it as it is.
    """

    name: str = "fit"
    train: tuple[str, ...] = ("*",)
    epochs: int = 1
    lr: float | None = None
    batch_size: int | None = None
    plain: bool = False
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    losses: tuple[str, ...] | None = None
    batch_statistics: bool = False
    smallest_batch: int = 1
    source: Source = "own"
    lr_share: float | None = None

    def check_numbers(self) -> None:
        """Refuse epochs and learning rates that are not numbers or are too small; called before the first round."""
        check_at_least(f"epochs of the phase {self.name!r}", self.epochs, 0)
        check_learning_rate(f"lr of the phase {self.name!r}", self.lr, optional=True)

    def trains_only(self, part: str) -> bool:
        """Return whether all that trains lies in a part of the model, such as ``"head"``."""
        return all(pattern.startswith(f"{part}.") for pattern in self.train)


@dataclass(frozen=True)
class _SGD:
    """Makes the optimizer; equal settings are equal, so that clients with equal phases can be trained together."""

    lr: float
    momentum: float
    weight_decay: float

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Personalization:
    """Adaptation of a trained model to each client's own data, also for clients that never trained.

    The second stage of Calibre (Chen et al., ICDCS 2024), with its settings as defaults, and of FedAvg-FT and FedBABU.
    Batches are single views, without augmentation by default; ``drop_last`` of the data module does not count. Where
    an encoder with batch normalization trains, a last batch of a single sample is left out, and a client that has no
    more than one sample is evaluated as it is, with a warning.

    Attributes:
        train: ``"linear"`` fits a new linear head on the features of the trained encoder, which stays as it is
            (Calibre), ``"linear+encoder"`` trains the encoder with it (Calibre's published implementation, with 5
            epochs and augmentation); ``"head"`` trains the method's own head or heads further, ``"all"`` the whole
            model. ``"nothing"`` evaluates every client, novel ones included, as the method does without the stage; the
            other settings then have no effect.
        epochs: Passes over the client's training data.
        lr: Learning rate of SGD.
        momentum: Its momentum.
        weight_decay: Its weight decay.
        batch_size: Samples in a batch.
        augment: Whether batches are augmented by the data set's usual random crops and flips, those of the data
            module's ``augment=True``, whatever it has for the training.
    """

    train: Trained = "linear"
    epochs: int = 10
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 32
    augment: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_choice("personalize.train", self.train, get_args(Trained))
        check_at_least("personalize.epochs", self.epochs, 1)
        check_at_least("personalize.batch_size", self.batch_size, 1)
        check_learning_rate("personalize.lr", self.lr, strict=True)
        check_number("personalize.momentum", self.momentum)
        check_number("personalize.weight_decay", self.weight_decay)

    @property
    def new_head(self) -> bool:
        """Whether clients train a new linear head instead of the method's own."""
        return self.train in ("linear", "linear+encoder")

    @property
    def adapts(self) -> bool:
        """Whether clients adapt anything."""
        return self.train != "nothing"

    def phase(self, heads: tuple[str, ...], losses: tuple[str, ...] | None = None) -> Phase:
        """The phase that trains ``heads``, or everything, on the sum of some loss terms."""
        make = _SGD(self.lr, self.momentum, self.weight_decay)
        train = ("*",) if self.train in ("all", "linear+encoder") else heads
        return Phase("fine_tune", train, self.epochs, None, self.batch_size, True, make, losses)
