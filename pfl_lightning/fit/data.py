"""The training data of one local fit, with its settings: batches, values of samples and cached features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn

from pfl_lightning.data import BatchSource, SplitSource
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.inner_loop import evaluating


@dataclass
class FitData:
    """Training part of a client with the settings of its local fit.

    Attributes:
        part: The training samples.
        batch_size: Samples in a batch of the local fit.
        drop_last: Whether an incomplete last batch is left out.
        augment: Whether batches are augmented.
        augment_plain: Whether plain batches are augmented, too, which are single views in any case.
        views: Augmented copies of every sample in a batch.
        eval_batch_size: Samples in a batch without gradients.
        device: Where batches are delivered.
        forward_context: Context of every forward pass, such as the outer Trainer's autocast.
        convert_input: Conversion of inputs to the type of the outer Trainer's precision.
        labeled: The labeled samples, for plain batches; ``None`` where all samples have labels.
        validation: The validation part, for a local fit that watches its own progress.
        values: What :meth:`attach` has given every sample, (n, ...); ``None`` where nothing is attached.
    """

    part: SplitSource
    batch_size: int
    drop_last: bool = False
    augment: bool = False
    views: int = 1
    eval_batch_size: int = 1000
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    convert_input: Callable[[Tensor], Tensor] = lambda inputs: inputs
    labeled: SplitSource | None = None
    validation: SplitSource | None = None
    augment_plain: bool = False
    values: Tensor | None = None
    _plain: BatchSource | None = field(default=None, repr=False)
    cached_features: tuple[tuple[tuple[int, int], ...], Tensor] | None = field(default=None, repr=False)

    def for_phase(self, batch_size: int | None = None, plain: bool = False, smallest_batch: int = 1) -> FitData:
        """Data with the settings of a phase; the same object where nothing differs.

        Args:
            batch_size: Samples in a batch; ``None`` keeps it.
            plain: Whether batches are single views without augmentation, of labeled samples only, with the incomplete
                last batch.
            smallest_batch: Samples that a last batch must have, or it is dropped, unless it is the only one.
        """
        if plain and self.labeled is not None:
            own = replace(self, part=self.labeled, labeled=None, _plain=None, cached_features=None)
            if self.values is not None:
                own.values = self.values[: own.num_samples]  # the labeled samples come first
            return own.for_phase(batch_size, plain, smallest_batch)
        size = self.batch_size if batch_size is None else batch_size
        augment, views = (self.augment_plain, 1) if plain else (self.augment, self.views)
        drop_last = self.drop_last and not plain
        if 1 < size < self.num_samples:
            drop_last = drop_last or 0 < self.num_samples % size < smallest_batch
        if (size, drop_last, augment, views) == (self.batch_size, self.drop_last, self.augment, self.views):
            return self
        return replace(self, batch_size=size, drop_last=drop_last, augment=augment, views=views)

    def with_plain_augmentations(self, augmentations: tuple[Any, ...]) -> FitData:
        """The same data whose plain batches are augmented, too, in this way."""
        part = cast(Any, self.part).with_augmentations(augmentations)
        return replace(self, part=part, augment_plain=True, _plain=None, cached_features=None)

    def of_validation(self) -> FitData | None:
        """The validation part with the same settings; ``None`` if it has no samples."""
        if self.validation is None or not len(self.validation):
            return None
        own = replace(self, part=self.validation, labeled=None, validation=None, _plain=None, cached_features=None)
        own.values = None  # which belong to the training samples
        return own

    @property
    def num_samples(self) -> int:
        """Number of training samples, n_k."""
        return len(self.part)

    def class_counts(self, num_classes: int) -> Tensor:
        """Training samples of each class, n_kc, (C,)."""
        return self.part.class_counts(num_classes)

    @property
    def datamodule(self) -> LightningDataModule | None:
        """User-defined data module whose hooks apply to the batches; ``None`` for the package's own data."""
        return self.part.datamodule

    def loader(self, generator: torch.Generator) -> BatchSource:
        """Shuffled batches; every iteration draws a fresh order from ``generator``."""
        loader = self.part.loader(
            self.batch_size,
            device=self.device,
            generator=generator,
            shuffle=True,
            drop_last=self.drop_last,
            augment=self.augment,
            **({} if self.views == 1 else {"views": self.views}),
        )
        # Without augmentation all phases and passes of a fit share inputs that are gathered and normalized once.
        loader = loader if loader.augmented else loader.with_inputs(self.tensors()[0])
        return loader if self.values is None else loader.with_values(self.values)

    def attach(self, values: Tensor) -> None:
        """Attach a value to every sample for the rest of the fit: batches become (inputs, labels, values).

        They follow their samples in every order, epoch and view, in all phases on these data; the default
        ``training_step`` ignores them. Values, and not positions in a table, since clients' tables differ in length.

        Args:
            values: Values in the order of :meth:`tensors`, (n, ...).

        Raises:
            ConfigurationError: Another number of values than samples, or data whose batches are a project's own.
        """
        if not hasattr(type(self.part), "raw_inputs"):
            raise ConfigurationError(
                f"values are attached to samples of the package's own data modules, not to batches of a "
                f"{type(self.part).__name__}; use FromDatasets or FromLightning, which read them into tensors"
            )
        if values.ndim == 0 or len(values) != self.num_samples:
            raise ConfigurationError(
                f"one value for each of the {self.num_samples} samples can be attached, got shape "
                f"{tuple(values.shape)}; give them in the order of tensors()"
            )
        self.values = values.detach().to(self.device)

    def positions(self, generator: torch.Generator) -> Iterator[Tensor]:
        """One epoch of :meth:`loader` without augmentation, as positions in :meth:`tensors`, on the CPU.

        Yields:
            Positions of a batch's samples, (B,) or, with several views, (B, views).
        """
        count = self.num_samples
        options: dict[str, Any] = {} if self.views == 1 else {"views": self.views}
        whole = self.part.loader(count, generator=generator, shuffle=True, **options)
        ((order, _),) = whole.with_inputs(torch.arange(count))
        batches = order.split(self.batch_size)
        yield from batches[: count // self.batch_size] if self.drop_last else batches

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All inputs (n, ...) and labels (n,), not augmented."""
        if self._plain is None:
            self._plain = self.part.loader(self.eval_batch_size, device=self.device)
        return self._plain.tensors()

    def features(self, encoder: nn.Module) -> tuple[Tensor, Tensor]:
        """Features of all samples, (n, d), and their labels, (n,), without gradient, in evaluation mode.

        They are cached as long as the encoder does not change.
        """
        inputs, labels = self.tensors()
        version = tuple((id(t), t._version) for t in (*encoder.parameters(), *encoder.buffers()))
        if self.cached_features is None or self.cached_features[0] != version:
            with torch.no_grad(), evaluating(encoder), self.forward_context():
                # On a CPU, chunks that stay in its caches are faster than few large ones.
                size = min(self.eval_batch_size, 128) if self.device.type == "cpu" else self.eval_batch_size
                chunks = [encoder(self.convert_input(chunk)) for chunk in inputs.split(size)]
            self.cached_features = (version, torch.cat(chunks))
        return self.cached_features[1], labels
