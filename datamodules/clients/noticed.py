"""Warnings of data that train or are scored without an error, and probably not as meant."""

from __future__ import annotations

import warnings

import numpy as np
from torch import Tensor

from pfl_lightning.datamodules.clients.division import Division, IndexLists
from pfl_lightning.datamodules.clients.samples import Samples, broken_places

__all__ = ["warn_of_samples"]


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
