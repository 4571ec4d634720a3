"""Named tensors of a model's state: selected by patterns, loaded, and held by a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.tensor_lists import copied, write
from pfl_lightning.messages import State

__all__ = ["TensorDict", "load_state", "matching", "norm_names", "select_state", "tensors_in"]


@lru_cache(maxsize=1024)  # asked for in every local fit, of the same few models and phases
def matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Names that match at least one shell-style pattern, in their original order.

    Args:
        names: Parameter or buffer names such as ``encoder.conv1.weight``.
        patterns: Patterns such as ``encoder.*``.

    Raises:
        ConfigurationError: A pattern matches no name; the message lists the names.

    Example:
        >>> from pfl_lightning.state.tensors import matching
        >>> matching(("encoder.0.weight", "encoder.0.bias", "head.weight"), ("encoder.*", "*.weight"))
        ('encoder.0.weight', 'encoder.0.bias', 'head.weight')
        >>> matching(("encoder.0.weight", "encoder.0.bias", "head.weight"), ("*.bias",))
        ('encoder.0.bias',)
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"the pattern {pattern!r} matches no parameter or buffer; there are {list(names)} (frozen ones, with "
                "requires_grad=False, may not count)"
            )
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def select_state(module: nn.Module, names: Iterable[str], *, clone: bool = True) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a module by name, detached.

    Args:
        module: The module.
        names: Names as in its ``state_dict``.
        clone: Whether the tensors are copies; otherwise they share the module's memory.

    Raises:
        KeyError: The module has no tensor of this name.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.tensors import load_state, select_state
        >>> model = torch.nn.Linear(1, 2)
        >>> load_state(model, {"bias": torch.tensor([1.0, 2.0])})
        >>> select_state(model, ["bias"])
        {'bias': tensor([1., 2.])}
    """
    state = module.state_dict()
    chosen = {name: state[name] for name in names}
    return dict(zip(chosen, copied(list(chosen.values())), strict=True)) if clone else chosen


def norm_names(module: nn.Module, *, affine: bool) -> set[str]:
    """Names of the running statistics of all batch and instance normalization layers.

    Args:
        module: The module, with all its layers.
        affine: Whether their weights and biases are included.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.tensors import norm_names
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> sorted(norm_names(model, affine=False))
        ['1.num_batches_tracked', '1.running_mean', '1.running_var']
        >>> len(norm_names(model, affine=True))  # with 1.weight and 1.bias
        5
    """
    found: set[str] = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            learned = {name for name, _ in layer.named_parameters(prefix)} if affine else set()
            found |= learned | {name for name, _ in layer.named_buffers(prefix)}
    return found


@torch.no_grad()
def load_state(module: nn.Module, state: State) -> None:
    """Copy tensors into the module's parameters and buffers of the same names; the others are unchanged.

    Raises:
        KeyError: The module has no tensor of this name.
        ConfigurationError: It has one of another shape.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.tensors import load_state
        >>> model = torch.nn.Linear(1, 2)
        >>> load_state(model, {"bias": torch.tensor([1.0, 2.0])})
        >>> model.bias.tolist()
        [1.0, 2.0]
    """
    own = module.state_dict()  # shares storage with the module
    for name, value in state.items():
        if own[name].shape != value.shape:  # copy_ would stretch some of them without a word
            raise ConfigurationError(
                f"{name!r} of {type(module).__name__} has shape {tuple(own[name].shape)}, but the values for it "
                f"have {tuple(value.shape)}"
            )
    write([own[name] for name in state], list(state.values()))


class TensorDict(nn.Module):
    """Named tensors as buffers, so that they move, are saved and are loaded with the module that holds them.

    Args:
        state: Initial content.
        persistent: Whether the content is part of ``state_dict``.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.tensors import TensorDict
        >>> prototypes = TensorDict({"class.0": torch.tensor([1.0, 2.0])})
        >>> prototypes.as_state()
        {'class.0': tensor([1., 2.])}
        >>> list(prototypes.state_dict())  # a buffer's name must not have a dot
        ['class/0']
        >>> prototypes.to(torch.float64).as_state()["class.0"].dtype
        torch.float64
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
        """Content by name, not copied."""
        return {key.replace("/", "."): tensor for key, tensor in self._buffers.items() if tensor is not None}

    def __len__(self) -> int:
        return len(self._buffers)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load all names of the checkpoint: the content may have grown since construction."""
        if self._persistent:
            found = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
            device = next((b.device for b in self._buffers.values() if b is not None), None)
            # A copy: the checkpoint's tensors may be views of its file.
            self.assign({k.replace("/", "."): v.to(device or v.device, copy=True) for k, v in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in lists, tuples and dictionaries of whatever depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
