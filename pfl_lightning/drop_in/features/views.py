"""Two views of a batch: two readings of its items, under two draws of the data set's own transforms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from pfl_lightning.data import TwoViews
from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.engines.sequential import BATCH_HOOKS
from pfl_lightning.state.equality import same

_log = logging.getLogger(__name__)


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
            "%s compares two views of each item, two readings of it, and both are equal: the training Dataset has no "
            "random transform (crops, flips, noise), and no hook of module or data module (on_after_batch_transfer) "
            "changes batches at random; give it one of these",
            method,
        )
