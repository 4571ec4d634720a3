"""Options of a client, as a method's ``__init__`` passes them on.

``**options: Unpack[ClientOptions]`` lets editors complete ``lr`` and ``epochs`` of every method, and type checkers
refuse wrong names and values. A method that names an option itself, to give it its own default, takes the remaining
options from one of the smaller classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn

if TYPE_CHECKING:
    from typing import Unpack as Unpack

    from pfl_lightning.datamodules.augmentation.ops import Augmentation
else:

    class Unpack:
        """``typing.Unpack`` for type checkers, ``Any`` at run time.

        jsonargparse takes the options of an unpacked TypedDict from the TypedDict, which has no defaults. Of any other
        annotation it follows ``**options`` to the base class, so that ``--help`` and saved configs show the defaults.
        """

        def __class_getitem__(cls, options: Any) -> Any:
            """``Any``, whatever the options."""
            return Any


BatchNorm = Literal["shared", "own_statistics", "own"]
"""Whether layers of batch normalization travel, keep their running statistics on the client, or stay there whole."""

Schedule = Literal["rounds", "continue", "restart"]
"""What a schedule of the learning rate counts before a local fit: all rounds, the client's own, or nothing."""


class DivisionOptions(TypedDict, total=False):
    """Keyword arguments of :class:`~pfl_lightning.datamodules.FromLoaders`: how data are divided among clients."""

    test_share: float
    test_samples_per_client: int | None
    novel_clients: int | float
    seed: int


class DataOptions(DivisionOptions, total=False):
    """Keyword arguments of :class:`~pfl_lightning.datamodules.FederatedDataModule`, where they are described."""

    eval_batch_size: int
    validation_share: float
    augment: bool | list[Augmentation]
    normalize: bool
    mean: list[float] | None
    std: list[float] | None
    drop_last: bool
    public: int | float | str | None


class ImageOptions(DataOptions, total=False):
    """Keyword arguments of :class:`~pfl_lightning.datamodules.ImageFolder` beside its folder."""

    image_size: int | None
    cache_dir: str | None


class SGDOptions(TypedDict, total=False):
    """Options of the local SGD."""

    lr: float
    momentum: float
    weight_decay: float


class FitOptions(TypedDict, total=False):
    """Length of a local fit, and what takes the place of SGD."""

    epochs: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None


class SharingOptions(TypedDict, total=False):
    """What of batch normalization is shared, and what a schedule of the learning rate counts."""

    batch_norm: BatchNorm | None
    schedule: Schedule


class EvaluationOptions(SharingOptions, total=False):
    """The model that is evaluated, and its fine-tuning before; and what of batch normalization is shared."""

    fine_tune: str | None
    fine_tune_epochs: int
    fine_tune_lr: float | None
    eval_model: str | None


class TrainingOptions(SGDOptions, FitOptions, SharingOptions, total=False):
    """Options of a method with its own defaults of fine-tuning and evaluation."""


class OptionsWithoutSGD(FitOptions, EvaluationOptions, total=False):
    """Options of a method with its own defaults of SGD."""


class OptionsWithoutFit(EvaluationOptions, total=False):
    """Options of a method with its own defaults of SGD and of the length of a local fit."""

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None


class ClientOptions(SGDOptions, FitOptions, EvaluationOptions, total=False):
    """Keyword arguments of :class:`~pfl_lightning.client.FederatedClient`, where they are described."""
