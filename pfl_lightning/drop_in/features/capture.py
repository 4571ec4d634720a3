"""The features that a user's module computes in its own steps, the classes of their batch, and its two views."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from pfl_lightning.data import LABEL_KEYS, TwoViews, class_of_batch
from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.engines.sequential import BATCH_HOOKS
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.equality import same

_log = logging.getLogger(__name__)


class ClassesUnknown(ConfigurationError):
    """Batches do not tell the classes of their samples, and nothing is given that does."""


@dataclass(frozen=True)
class FeatureSource:
    """Where a method finds the features and the classes of a batch in a user's module.

    Attributes:
        layer: Name of the layer whose output are the features; ``None`` for the input of the head.
        width: Width of the features, d.
        labels: Gives the classes of a batch; ``None`` where batches tell them.
    """

    layer: str | None
    width: int
    labels: Callable[[Any], Any] | None = None


class FeatureCapture:
    """Keeps the features of the newest forward pass, by a hook on a layer.

    Args:
        module: The user's module.
        head: Name of its head.
        source: Which layer has the features.
        enter: Makes of them what enters the head instead; ``None`` where it takes the features themselves.

    Attributes:
        found: What the layer's newest call has shown; ``None`` for no call.
        calls: How often it was called.
        compared: Whether it is known that ``forward`` and the training step give the same features, or was said.
    """

    def __init__(
        self, module: nn.Module, head: str, source: FeatureSource, enter: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._module, self._head, self.source, self._enter = module, head, source, enter
        self.found: Any = None
        self.calls, self.compared = 0, False

    def on(self, module: nn.Module) -> FeatureCapture:
        """The same for a copy of the module."""
        return FeatureCapture(module, self._head, self.source)

    @property
    def place(self) -> str:
        """Where the features come from, for messages."""
        return f"the input of {self._head!r}" if self.source.layer is None else f"the output of {self.source.layer!r}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep features inside; what was there before is forgotten."""
        self.found, self.calls = None, 0
        if self.source.layer is None:
            handle: Any = self._module.get_submodule(self._head).register_forward_pre_hook(self._see, with_kwargs=True)
        else:
            handle = self._module.get_submodule(self.source.layer).register_forward_hook(self._see_output)
        try:
            yield
        finally:
            handle.remove()

    def _see(self, layer: nn.Module, arguments: Any, named: Any) -> Any:
        self.found = found = first_tensor((arguments, named))
        self.calls += 1
        if self._enter is None or found is None:
            return None
        entering = self._enter(self._checked(found))
        if arguments and arguments[0] is found:
            return (entering, *arguments[1:]), named
        return arguments, {name: entering if value is found else value for name, value in named.items()}

    def _see_output(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        self.found = first_tensor(output)
        self.calls += 1

    def take(self) -> Tensor:
        """The features, (N, d), which are then forgotten.

        Raises:
            ConfigurationError: The step has not called the layer, or gives features of another shape.
        """
        found, self.found = self.found, None
        name = type(self._module).__name__
        if found is None:
            raise ConfigurationError(
                f"a step of {name} has not called the layer with the features ({self.place}): set features= to a "
                "layer that it calls"
            )
        return self._checked(found)

    def _checked(self, found: Tensor) -> Tensor:
        name, width = type(self._module).__name__, self.source.width
        features = found.flatten(1) if found.ndim > 1 else found
        if features.ndim != 2 or features.shape[1] != width:
            raise ConfigurationError(
                f"features must have the shape (batch, {width}), {self.place} of {name} has {tuple(found.shape)}: "
                "set features= to the layer that gives one vector for each sample (after the pooling)"
            )
        return features


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of floating point in what a layer takes or gives."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for found in map(first_tensor, parts) if found is not None), None)


def classes_of_batch(batch: Any, labels: Callable[[Any], Any] | None) -> Tensor:
    """Classes (N,) of a batch: what ``labels`` gives for it, or else what the batch itself tells.

    ``labels`` is the function that partitions call with single items. One that reads an entry (``item["topic"]``,
    ``graph.y``) reads it in a batch, too. One that makes a number of it (``int(item[1])``) cannot: then the batch
    tells.

    Raises:
        ConfigurationError: Neither gives one whole number for each sample, or one is below 0.
    """
    found = _classes_of(batch, labels)
    if len(found) and (least := int(found.min())) < 0:
        raise ClassesUnknown(
            f"this method needs the class of every sample, 0 or more, got {least}. It cannot train with samples that "
            f"ignore_index={least} leaves out of a loss: remove them from the data, or use a method that needs no "
            "classes, such as FedAvg, FedPer or Ditto"
        )
    return found


def _classes_of(batch: Any, labels: Callable[[Any], Any] | None) -> Tensor:
    reason = "labels= is not given"
    if labels is not None:
        try:
            found = labels(batch)
        except Exception as error:  # of the user's own function, which may have been written for items
            reason = f"labels= failed with {type(error).__name__}: {error}"
        else:
            found = torch.as_tensor(found)
            if _are_classes(found):
                return found.reshape(len(found)).long()
            reason = f"labels= gave a tensor of shape {tuple(found.shape)} and type {found.dtype}"
    known = class_of_batch(batch)
    if known is None:
        example = 'batch["topic"]' if isinstance(batch, Mapping) else "batch[2]"
        example = "batch.y" if hasattr(batch, "y") else example
        raise (ClassesUnknown if labels is None else ConfigurationError)(
            f"this method needs the class of every sample, a batch here is a {type(batch).__name__} that is not a pair "
            f"(inputs, classes), has no entry {', '.join(LABEL_KEYS)}, and is not a batch of graphs with a class y for "
            f"each of them; {reason}: set labels= to a function that returns the classes (N,) of a batch, such as "
            f"lambda batch: {example}"
        )
    return known


def _are_classes(found: Tensor) -> bool:
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    return whole and found.ndim in (1, 2) and found.shape[1:].numel() == 1


# ---------------------------------------------------------------------- two views of a batch


@contextmanager
def hooks_on_each_view(owner: Any, stacked: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let a user's hooks that change batches see each of two views by itself.

    Args:
        owner: The module, the data module, or nothing.
        stacked: Whether batches are now those of the package's own data, with both views in one tensor.
    """
    if owner is None:
        yield
        return

    def on_each(hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def changed(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(batch, TwoViews) and stacked():
                batch = TwoViews(*unstacked(batch))
            if isinstance(batch, TwoViews):
                return TwoViews(*(hook(view, *args, **kwargs) for view in batch))
            return hook(batch, *args, **kwargs)

        return changed

    with patched(owner, **{n: on_each(getattr(owner, n)) for n in BATCH_HOOKS if is_overridden(n, owner)}):
        yield


def unstacked(batch: Any) -> tuple[Any, ...]:
    """Both views of a batch of the package's own data: inputs (N, 2, ...), and labels."""
    inputs, labels = batch
    return tuple((view, labels) for view in inputs.unbind(1))


def say_if_equal(views: Sequence[Any], method: str) -> None:
    """Say in the log what is missing where two views of a batch are equal."""
    first, second = views
    if same(first, second):
        _log.warning(
            "%s compares two views of each item, which is read twice, and both are equal: the training Dataset has no "
            "random transform (crops, flips, noise), and no hook of module or data module (on_after_batch_transfer) "
            "changes batches at random; add one of these",
            method,
        )
