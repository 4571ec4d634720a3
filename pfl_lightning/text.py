"""Names that were probably meant. Needs no import of torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

BEGINNING = 6
"""Letters from which a word may be the beginning of a name."""


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The name that is most like a word, in whatever case; empty if none is.

    "Fed" and "pFed", with which most methods begin, make no two of them alike.

    Args:
        word: What was given.
        names: What is known.
        cutoff: How alike they are at least, from 0 to 1.

    Example:
        >>> from pfl_lightning.text import nearest
        >>> nearest("fedpak", ["FedAvg", "FedPAC"]), nearest("xyz", ["FedAvg"]), nearest("FedNova", ["FedBN"])
        ('FedPAC', '', '')
        >>> nearest("Dirichlt", ["IID", "DirichletOverClasses"])
        'DirichletOverClasses'
    """
    distinct = {re.sub(r"^p?fed", "", name.lower()): name for name in names}
    meant = re.sub(r"^p?fed", "", word.lower())
    found = difflib.get_close_matches(meant, distinct, n=1, cutoff=cutoff)
    if not found and len(meant) >= BEGINNING:
        beginnings = {name[: len(meant)]: name for name in reversed(distinct)}
        found = [beginnings[name] for name in difflib.get_close_matches(meant, beginnings, n=1, cutoff=0.85)]
    return distinct[found[0]] if found else ""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question after the nearest one; empty if none is near.

    Args:
        word: The unknown name.
        names: What is known.

    Example:
        >>> from pfl_lightning.text import did_you_mean
        >>> did_you_mean("smal_cnn", ["mlp", "small_cnn"])
        "; did you mean 'small_cnn'?"
    """
    near = nearest(word, names)
    return f"; did you mean {near!r}?" if near else ""
