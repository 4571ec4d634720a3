"""Encoders by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

EncoderClass = TypeVar("EncoderClass", bound=type[nn.Module])


@dataclass(frozen=True)
class _Entry:
    """What a name stands for: a class and the options that the name gives it."""

    encoder: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)


_ENCODERS: dict[str, _Entry] = {}


def register(name: str, **options: Any) -> Callable[[EncoderClass], EncoderClass]:
    """Class decorator that makes an encoder known under `name`.

    The class is built as `Encoder(input_shape=..., **options)`, has an integer attribute `out_features`, and maps
    (N, *input_shape) to (N, out_features). A class may have several names, each with its own options.

    Args:
        name: the name used in configs.
        options: arguments that the name gives the class; those given to `build_encoder` come before them.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        ValueError: if the name belongs to another class already.
    """

    def decorate(encoder: EncoderClass) -> EncoderClass:
        known = _ENCODERS.get(name)
        # A class defined anew in a reloaded module replaces its former self.
        if known is not None and _path(known.encoder) != _path(encoder):
            raise ValueError(f"encoder name {name!r} is taken by {known.encoder.__qualname__}: choose another name")
        _check_options(name, encoder, options)
        _ENCODERS[name] = _Entry(encoder, options)
        return encoder

    return decorate


def encoder_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_ENCODERS))


def build_encoder(name: str, input_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build a registered encoder.

    Args:
        name: a registered name, see `encoder_names`, or the import path of a class.
        input_shape: shape of one sample, for instance (channels, height, width).
        options: the encoder's own arguments.

    Returns:
        The encoder, freshly initialized from torch's global generator.

    Raises:
        ValueError: if the name is unknown (the message lists the known names), or the input does not fit the encoder.
        TypeError: if an option is unknown (the message lists the known options), or the class breaks the contract.
    """
    entry = _find(name)
    _check_options(name, entry.encoder, options)
    encoder = entry.encoder(input_shape=tuple(input_shape), **{**entry.options, **options})
    if not isinstance(getattr(encoder, "out_features", None), int):
        raise TypeError(f"encoder {name!r} must set an integer attribute `out_features` in its constructor")
    return encoder


def encoder_class(name: str) -> type[nn.Module]:
    """Return the class that a name or an import path stands for.

    Args:
        name: a registered name, or the import path of a class.

    Raises:
        ValueError: if there is none; the message lists the known names.
    """
    return _find(name).encoder


def _find(name: str) -> _Entry:
    if any(mark in name for mark in "[]{},"):
        raise ValueError(
            f"{name!r} is no name of an encoder; a list of encoders is written as [name, name], one with arguments as "
            "{class_path: package.Class, init_args: {...}}, and both may be mixed"
        )
    found = _imported(name) if "." in name else None
    entry = _ENCODERS.get(name) if found is None else _Entry(found)
    if entry is None:
        raise ValueError(
            f"unknown encoder {name!r}{_nearest(name, _ENCODERS)}; known: {', '.join(encoder_names())}; "
            "or an import path such as package.module.Class"
        )
    return entry


def _path(encoder: type[nn.Module]) -> tuple[str, str]:
    return encoder.__module__, encoder.__qualname__


def _imported(path: str) -> type[nn.Module] | None:
    module, _, name = path.rpartition(".")
    try:
        found: type[nn.Module] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"the encoder {path!r} cannot be imported: {error}") from error
    return found


def _check_options(name: str, encoder_class: type[nn.Module], options: Iterable[str]) -> None:
    parameters = inspect.signature(encoder_class).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [key for key in parameters if key != "input_shape"]
    for option in options:
        if option not in known:
            raise TypeError(
                f"encoder {name!r} has no option {option!r}{_nearest(option, known)}; "
                f"known: {', '.join(known) or 'none'}"
            )


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""
