"""Named parts of a model's state: selecting, loading, and keeping them in a module."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import State

__all__ = ["TensorDict", "load_state", "matching", "norm_names", "select_state"]


@lru_cache(maxsize=1024)  # asked for in every local fit, of the same few models and phases
def matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that fit at least one shell-style pattern, in their own order.

    Args:
        names: Parameter or buffer names such as ``encoder.conv1.weight``.
        patterns: Patterns such as ``encoder.*``.

    Raises:
        ConfigurationError: A pattern fits no name; it lists the names there are.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(f"the pattern {pattern!r} fits no parameter or buffer; there are {list(names)}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def select_state(module: nn.Module, names: Iterable[str], *, clone: bool = True) -> dict[str, Tensor]:
    """The named parameters and persistent buffers of a module, detached; copies unless ``clone`` is false."""
    state = module.state_dict()
    return {name: state[name].clone() if clone else state[name] for name in names}


def norm_names(module: nn.Module, *, affine: bool) -> set[str]:
    """Names of the running statistics of all batch and instance normalization layers.

    Args:
        module: Where to look.
        affine: Whether their weights and biases are named, too.
    """
    found: set[str] = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            learned = {name for name, _ in layer.named_parameters(prefix)} if affine else set()
            found |= learned | {name for name, _ in layer.named_buffers(prefix)}
    return found


@torch.no_grad()
def load_state(module: nn.Module, state: State) -> None:
    """Copy tensors into the module's parameters and buffers of the same names.

    Raises:
        KeyError: A name that the module does not have.
    """
    own = module.state_dict()  # shares storage with the module
    for name, value in state.items():
        own[name].copy_(value)


class TensorDict(nn.Module):
    """Named tensors as buffers, so that they move, are saved and are loaded with the module that holds them.

    Args:
        state: Initial content.
        persistent: Whether the content is part of ``state_dict``.
    """

    def __init__(self, state: State | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        self._persistent = persistent
        self.assign(state or {})

    def assign(self, state: State) -> None:
        """Replace the whole content; the tensors are kept as they are, not copied."""
        for key in list(self._buffers):
            delattr(self, key)
        for name, tensor in state.items():
            self.register_buffer(name.replace(".", "/"), tensor.detach(), persistent=self._persistent)

    def as_state(self) -> dict[str, Tensor]:
        """The content by name, not copied."""
        return {key.replace("/", "."): tensor for key, tensor in self._buffers.items() if tensor is not None}

    def __len__(self) -> int:
        return len(self._buffers)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take whatever names the checkpoint has: the content may have grown since construction."""
        if self._persistent:
            found = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
            device = next((b.device for b in self._buffers.values() if b is not None), None)
            # A copy: the checkpoint's tensors may be views of its file.
            self.assign({k.replace("/", "."): v.to(device or v.device, copy=True) for k, v in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
