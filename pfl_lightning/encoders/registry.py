"""Registry of encoders by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from pfl_lightning.names import did_you_mean, imported, stands_for

EncoderClass = TypeVar("EncoderClass", bound=type[nn.Module])


_ENCODERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {}
"""Classes by name, with the options that belong to the name."""


def register(name: str, **options: Any) -> Callable[[EncoderClass], EncoderClass]:
    """Class decorator that registers an encoder under ``name``.

    The class is built as ``Encoder(input_shape=..., **options)``, has an integer attribute ``out_features``, and maps
    (N, *input_shape) to (N, out_features). A class may have several names, each with its own options.

    Args:
        name: The name used in configs.
        options: Arguments of the class under this name; arguments of ``build_encoder`` override them.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        ValueError: If the name already belongs to another class.

    Example:
        >>> from torch import nn
        >>> from pfl_lightning.encoders import build_encoder, register
        >>> @register("my_linear_wide", out_features=256)
        ... @register("my_linear")
        ... class MyLinear(nn.Module):
        ...     def __init__(self, input_shape, out_features=64):
        ...         super().__init__()
        ...         self.out_features = out_features
        ...         self.layer = nn.Linear(input_shape[0], out_features)
        ...     def forward(self, x):
        ...         return self.layer(x)
        >>> build_encoder("my_linear_wide", input_shape=(30,)).out_features
        256
    """

    def decorate(encoder: EncoderClass) -> EncoderClass:
        known, _ = _ENCODERS.get(name, (encoder, {}))
        # A class that is defined again in a reloaded module replaces the old one.
        if (known.__module__, known.__qualname__) != (encoder.__module__, encoder.__qualname__):
            raise ValueError(f"encoder name {name!r} is already used by {known.__qualname__}: choose another name")
        _check_options(name, encoder, options)
        _ENCODERS[name] = encoder, options
        return encoder

    return decorate


def encoder_names() -> tuple[str, ...]:
    """Return the registered names, sorted.

    Example:
        >>> [name for name in encoder_names() if name.startswith("resnet18")]
        ['resnet18', 'resnet18_512', 'resnet18_projector', 'resnet18_small']
    """
    return tuple(sorted(_ENCODERS))


def build_encoder(name: str, input_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build a registered encoder.

    Args:
        name: A registered name, see ``encoder_names``, or the import path of a class.
        input_shape: Shape of one sample, for instance (channels, height, width).
        options: The encoder's own arguments.

    Returns:
        The encoder, freshly initialized from torch's global generator.

    Raises:
        ValueError: If the name is unknown (the message lists the known names), or the input does not fit the encoder.
        TypeError: If an option is unknown (the message lists the known options), or the class has no ``out_features``.

    Example:
        >>> import torch
        >>> encoder = build_encoder("mlp", input_shape=(1, 8, 8), hidden=(32,), out_features=16)
        >>> encoder(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 16])
    """
    made, own = find_encoder(name)
    _check_options(name, made, options)
    encoder = made(input_shape=tuple(input_shape), **{**own, **options})
    if not isinstance(getattr(encoder, "out_features", None), int):
        raise TypeError(f"encoder {name!r} must set an integer attribute `out_features` in its constructor")
    return encoder


def encoder_class(name: str) -> type[nn.Module]:
    """Return the class of a registered name or an import path.

    Args:
        name: A registered name, or the import path of a class.

    Raises:
        ValueError: If there is none; the message lists the known names.

    Example:
        >>> encoder_class("dcpfl_cnn3").__name__, encoder_class("pfl_lightning.encoders.mlp.MLP").__name__
        ('DCPFLCNN', 'MLP')
    """
    return find_encoder(name)[0]


def find_encoder(name: str) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of a registered name or an import path, and the options that belong to the name.

    Raises:
        ValueError: If there is none; the message lists the known names.
    """
    if "." in name:
        return _imported(name), {}
    if name not in _ENCODERS:
        raise ValueError(
            f"unknown encoder {name!r}{did_you_mean(name, _ENCODERS)}; known: {', '.join(encoder_names())}; "
            "or an import path such as package.module.Class; a list of encoders is written as [name, name], one with "
            "arguments as {class_path: package.Class, init_args: {...}}"
        )
    return _ENCODERS[name]


def _imported(path: str) -> Any:
    """Encoder that an import path names. Nothing else is ever called."""
    found = imported(path)
    if not stands_for(found, nn.Module):
        raise ValueError(
            f"{path!r} is not an encoder: expected a subclass of torch.nn.Module, or a function that is declared to "
            "return one (def make(input_shape) -> nn.Module)"
        )
    return found


def _check_options(name: str, encoder_class: type[nn.Module], options: Iterable[str]) -> None:
    parameters = inspect.signature(encoder_class).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [key for key in parameters if key != "input_shape"]
    for option in options:
        if option not in known:
            raise TypeError(
                f"encoder {name!r} has no option {option!r}{did_you_mean(option, known)}; "
                f"known: {', '.join(known) or 'none'}"
            )


def num_parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters, trainable or not, without its buffers.

    Example:
        >>> num_parameters(nn.Linear(10, 2))
        22
    """
    return sum(parameter.numel() for parameter in module.parameters())
