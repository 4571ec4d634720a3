"""Words of the commands that have no Trainer: a parser whose errors are a sentence, and kinds of numbers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from pfl_lightning.cli.options.names import nearest_flag
from pfl_lightning.errors import UsageError

__all__ = ["WordParser", "share", "whole_number"]


class WordParser(argparse.ArgumentParser):
    """``argparse``'s parser, whose errors are told as all others of ``pfl``, without the list of all options.

    Options have no abbreviations: an unknown one is refused, with the one that was probably meant.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            UsageError: Says what is wrong.
        """
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        near = nearest_flag(unknown[1], self._option_string_actions) if unknown else ""
        meant = f": did you mean {near}?" if near else ""
        raise UsageError(f"{message}{meant} ({self.prog} --help lists the options)")


def whole_number(at_least: int) -> Callable[[str], int]:
    """A kind of option: whole numbers from a smallest one.

    Args:
        at_least: The smallest number.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if number < at_least:
            raise argparse.ArgumentTypeError(f"must be at least {at_least}, got {number}")
        return number

    return read


def share(text: str) -> float:
    """A kind of option: shares of one.

    Args:
        text: What was typed.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1 (0.8 is 80 %), got {text}")
    return value
