"""The name that was probably meant by one that is not known. Needs no import of torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["OF_CLASSES", "OTHER_NAMES", "nearest", "nearest_argument", "nearest_options"]

OTHER_NAMES = {
    "clients": "data.partition.num_clients",
    "communication_rounds": "trainer.max_epochs",
    "dataset": "data",
    "learning_rate": "model.method.lr",
    "local_epochs": "model.method.epochs",
    "max_rounds": "trainer.max_epochs",
    "num_rounds": "trainer.max_epochs",
    "rounds": "trainer.max_epochs",
    "seed": "seed_everything",
    "trainer.epochs": "trainer.max_epochs",
}
"""Names that options have elsewhere."""

OF_CLASSES = (
    *("data.batch_size", "data.partition", "data.partition.num_clients", "data.partition.samples_per_client"),
    *("data.root", "data.seed", "data.validation_share"),
    *("model.method.epochs", "model.method.lr", "model.method.momentum", "model.method.optimizer"),
)
"""Frequent options of the classes that a config names, which are not the parser's own."""


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that is most like a word, in whatever case; empty if none is.

    Example:
        >>> nearest("fedpak", ["FedAvg", "FedPAC"]), nearest("xyz", ["FedAvg"])
        ('FedPAC', '')
    """
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), lower, n=1)
    return lower[found[0]] if found else ""


def nearest_argument(word: str, names: Iterable[str]) -> str:
    """The argument of a class that is meant by an unknown one; empty if none is like it.

    Example:
        >>> nearest_argument("learning_rate", ["epochs", "lr"]), nearest_argument("epoch", ["epochs", "lr"])
        ('lr', 'epochs')
    """
    known = [*names]
    elsewhere = OTHER_NAMES.get(word, "").rpartition(".")[2]
    return elsewhere if elsewhere in known else nearest(word, known)


def nearest_options(word: str, options: Iterable[str]) -> list[str]:
    """Options that may be meant by an unknown one.

    Args:
        word: The unknown option, with or without dashes and value.
        options: All options, without dashes.

    Example:
        >>> options = ["loop.cohort", "trainer.max_epochs"]
        >>> nearest_options("--cohort=3", options), nearest_options("rounds", options)
        (['loop.cohort'], ['trainer.max_epochs'])
    """
    word = word.lstrip("-").partition("=")[0]
    last = word.rpartition(".")[2]
    if word in OTHER_NAMES or last in OTHER_NAMES:
        return [OTHER_NAMES.get(word) or OTHER_NAMES[last]]
    known = [name for name in dict.fromkeys((*options, *OF_CLASSES)) if not name.endswith("+")]
    same = [option for option in known if option.rpartition(".")[2] == last]
    begun = [option for option in known if option.startswith(word)]
    if 0 < len(same or begun) <= 3:
        return same or begun
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    lasts = {option.rpartition(".")[2]: option for option in known}
    return found or [lasts[name] for name in difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)]
