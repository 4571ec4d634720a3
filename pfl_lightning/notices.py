"""Warnings of local fits and evaluations, each shown once with its client; Lightning's notices of inner Trainers."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_shown: set[tuple[Any, ...]] = set()


def forget_shown() -> None:
    """Let warnings that were shown be shown again; called when a fit, a validation or a test is set up."""
    _shown.clear()


@contextmanager
def remembering_in(shown: set[tuple[Any, ...]]) -> Iterator[None]:
    """Remember what was shown in another set: a worker shows nothing, its main process does."""
    global _shown
    before, _shown = _shown, shown
    try:
        yield
    finally:
        _shown = before


def shown_before(*key: Any) -> bool:
    """Whether this was asked before of a message, its category, its file and its line."""
    known = key in _shown
    _shown.add(key)
    return known


Names = Sequence[str] | Mapping[int, str] | None
"""Names of clients, by their numbers; nothing where they have none."""


def few_of(found: Sequence[object], most: int) -> str:
    """The first ones, and how many more there are.

    Example:
        >>> few_of(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    return ", ".join(map(str, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")


def labels_of(clients: Sequence[int], names: Names = None, most: int = 5) -> str:
    """Clients by their numbers, with their names where they have names, not more than a few of them.

    Example:
        >>> labels_of([1, 0], ["Lyon", "Nice"]), labels_of([*range(7)])
        ('1 (Nice), 0 (Lyon)', '0, 1, 2, 3, 4 and 2 more')
    """
    return few_of([f"{client} ({names[client]})" if names else client for client in clients], most)


def named_clients(clients: Sequence[int], names: Names = None) -> str:
    """The same as words: ``client 1 (Nice)``, ``clients 1, 2 and 5``."""
    return f"client{'s' if len(clients) > 1 else ''} {labels_of(clients, names)}"


def counted(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> from pfl_lightning.notices import counted
        >>> counted(1, "run"), counted(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number} {what}" + ("" if number == 1 else "s")


LIGHTNING = r"(lightning\.(pytorch|fabric)|pytorch_lightning|lightning_fabric)\."
"""Modules of Lightning, under each of its names."""

NOTICES = (
    r".* does not have many workers|Consider setting `persistent_workers|.*is smaller than the logging interval"
    r"|You (passed in|defined) a `.*Skipping val loop|GPU available but not used|`max_epochs` was not set"
    r"|Found \d+ module\(s\) in eval mode|Total length of `.*` across ranks is zero|You called `self.log\(.*no logger"
    r"|You're resuming from a checkpoint that ended|You passed `Trainer\(accelerator='cpu', precision='16-mixed'"
    r"|You passed `deterministic=True` and|The `srun` command is available|`isinstance\(treespec, LeafSpec\)`"
)
"""Beginnings of Lightning's remarks on a Trainer and its loaders, not about the module that it trains."""

_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
_MODULES = ("utilities.rank_zero", "utilities.registry", "accelerators.cuda", "trainer.connectors.signal_connector")
LOGGERS = tuple(f"{package}.{module}" for package in _PACKAGES for module in _MODULES)
"""Loggers of what Trainers have found and why they have stopped."""


@contextmanager
def silence() -> Iterator[None]:
    """Keep back what Lightning says of every Trainer; what it says of a module, and what others say, comes through."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.filters.append(_is_no_notice)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOTICES, module=LIGHTNING)
            yield
    finally:
        for logger in loggers:
            logger.filters.remove(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    """Whether a record is an error, one of a level that the user has asked for, or not of a Trainer's own code."""
    if not logging.INFO <= record.levelno < logging.ERROR:
        return True
    packages = (sys.modules.get(name) for name in ("lightning", "pytorch_lightning", "lightning_fabric"))
    folders = tuple(f"{os.path.dirname(str(found.__file__))}{os.sep}" for found in packages if found is not None)
    return not record.pathname.startswith(folders) or f"{os.sep}callbacks{os.sep}" in record.pathname
