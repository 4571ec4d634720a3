"""Checks of arguments that several classes share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.names import did_you_mean

LARGEST_WHOLE = 2**31 - 1
"""Sizes and counts above it are slips of the keyboard, and would overflow in arithmetic of 64 bits."""

LARGEST_LR = 1e6
"""Learning rates above it turn weights into infinities within a step."""


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ConfigurationError: The message names the argument, the choices and the value.

    Example:
        >>> from pfl_lightning.checks import check_choice
        >>> check_choice("norm", "l1", ("mse", "l2"))
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: norm must be one of ('mse', 'l2'), got 'l1'
    """
    if value not in choices:
        hint = did_you_mean(str(value), map(str, choices))
        raise ConfigurationError(f"{name} must be one of {choices}, got {value!r}{hint}")


def check_names(name: str, value: object) -> None:
    """Refuse a string where several names or patterns are expected: it would be read letter by letter.

    Raises:
        ConfigurationError: The message names the argument and the string, and says how to write it.

    Example:
        >>> from pfl_lightning.checks import check_names
        >>> check_names("shared", "head.*")
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: shared must be a tuple of strings, got 'head.*': write ('head.*',)
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{name} must be a tuple of strings, got {value!r}: write ({value!r},)")


def check_number(
    name: str, value: float | None, least: float = 0.0, strict: bool = False, optional: bool = False
) -> None:
    """Refuse a number that is not finite, or too small.

    Args:
        name: Name of the argument.
        value: Its value.
        least: Least value.
        strict: Whether the least value itself is too small.
        optional: Whether ``None`` is accepted.

    Raises:
        ConfigurationError: The message names the argument, the bound and the value.

    Example:
        >>> from pfl_lightning.checks import check_number
        >>> check_number("lr", 0.0, strict=True)
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: lr must be a finite number above 0, got 0.0
    """
    if optional and value is None:
        return
    bound = f"{'above' if strict else 'of at least'} {least:g}"
    try:
        if value is None or isinstance(value, bool):
            raise TypeError
        fits = math.isfinite(value) and value >= least and not (strict and value == least)
    except TypeError:
        raise ConfigurationError(f"{name} must be a finite number {bound}, got {value!r}") from None
    if not fits:
        raise ConfigurationError(f"{name} must be a finite number {bound}, got {value}")


def check_between(name: str, value: float | None, low: float, high: float, optional: bool = False) -> None:
    """Refuse a number outside of a closed range; ``None`` is accepted where it is ``optional``.

    Raises:
        ConfigurationError: The message names the argument, the range and the value.

    Example:
        >>> from pfl_lightning.checks import check_between
        >>> check_between("p", 1.5, 0, 1)
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: p must be between 0 and 1, got 1.5
    """
    if optional and value is None:
        return
    try:
        fits = value is not None and not isinstance(value, bool) and low <= value <= high
    except TypeError:
        fits = False
    if not fits:
        raise ConfigurationError(f"{name} must be between {low:g} and {high:g}, got {value!r}")


def check_learning_rate(name: str, value: float | None, strict: bool = False, optional: bool = False) -> None:
    """Refuse a learning rate that is not finite, negative, or absurdly large.

    Args:
        name: Name of the argument.
        value: Its value.
        strict: Whether 0 is refused, too.
        optional: Whether ``None`` is accepted.

    Raises:
        ConfigurationError: The message names the argument, the bound and the value.

    Example:
        >>> from pfl_lightning.checks import check_learning_rate
        >>> check_learning_rate("lr", 1e30)
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: lr must be at most 1e+06, got 1e+30
    """
    check_number(name, value, strict=strict, optional=optional)
    if value is not None and value > LARGEST_LR:
        raise ConfigurationError(f"{name} must be at most {LARGEST_LR:g}, got {value:g}")


def check_at_least(name: str, value: int | None, least: int, optional: bool = False) -> None:
    """Refuse a number that is not whole, too small, or larger than any size or count.

    ``None`` is accepted where it is ``optional``.

    Raises:
        ConfigurationError: The message names the argument, the least value and the value.

    Example:
        >>> from pfl_lightning.checks import check_at_least
        >>> check_at_least("epochs", 0, 1)
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: epochs must be at least 1, got 0
    """
    if optional and value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if value < least:
        raise ConfigurationError(f"{name} must be at least {least}, got {value}")
    if value > LARGEST_WHOLE:
        raise ConfigurationError(f"{name} must be at most {LARGEST_WHOLE}, got {value}")


def check_seed(name: str, value: object) -> None:
    """Refuse a seed that is not a whole number of at least 0.

    Raises:
        ConfigurationError: Names the argument and the value.

    Example:
        >>> from pfl_lightning.checks import check_seed
        >>> check_seed("seed", -1)
        Traceback (most recent call last):
        pfl_lightning.errors.ConfigurationError: seed must be a whole number of at least 0, got -1
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{name} must be a whole number of at least 0, got {value!r}")


def check_number_of_clients(name: str, value: int | float, because: str) -> None:
    """Refuse what is neither a share of all clients nor a number of clients.

    Args:
        name: Name of the argument.
        value: A share (a float in (0, 1]) or a number.
        because: Why there must be clients.

    Raises:
        ConfigurationError: Names the argument and the value.
    """
    is_share = isinstance(value, float) and 0 < value <= 1
    if not is_share and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigurationError(
            f"{name} must be a share in (0, 1] or a number of clients of at least 1, got {value!r}; {because}"
        )


@contextmanager
def as_mistaken_data() -> Iterator[None]:
    """Mark what is wrong with data that are set up: ``pfl`` exits with status 2, whichever error tells it."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        error.is_mistaken_data = True  # type: ignore[union-attr]
        raise
