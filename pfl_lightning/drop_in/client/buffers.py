"""Names and shapes of a module's buffers, which a local fit or an evaluation may change."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["BufferForms", "say_what_is_left_out"]

_log = logging.getLogger(__name__)

_Held = dict[str, dict[str, Tensor | None]]


class BufferForms:
    """Brings buffers that were added, or set to tensors of other shapes, back to what they were.

    The tensors themselves are held, not copies: who sets a buffer to another tensor leaves the former one as it was.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held: _Held = {}
        self._parameters: dict[str, set[str]] = {}
        self._shapes: dict[str, dict[str, torch.Size]] = {}
        self.hold(module)

    def hold(self, module: nn.Module) -> None:
        """Take the module's present buffers for those to bring back."""
        self._parameters = {name: set(layer._parameters.keys()) for name, layer in module.named_modules()}
        self._held = {name: dict(layer._buffers.items()) for name, layer in module.named_modules()}
        self._shapes = {
            name: {key: b.shape for key, b in own.items() if b is not None and not is_lazy(b)}
            for name, own in self._held.items()
        }

    def restore(self, module: nn.Module) -> dict[str, str]:
        """Bring buffers back.

        Returns:
            What has changed, of those that are part of the ``state_dict``, by name.
        """
        found = {}
        for name, layer in module.named_modules():
            if name not in self._held:  # a layer that was added
                continue
            for key, change in list(self._changes(name, layer)):
                if key not in layer._non_persistent_buffers_set:
                    found[f"{name}.{key}".removeprefix(".")] = change
                self._put_back(name, layer, key)
        return found

    def _changes(self, name: str, layer: nn.Module) -> Iterator[tuple[str, str]]:
        held, shapes = self._held[name], self._shapes[name]
        for key, now in layer._buffers.items():
            if now is None or is_lazy(now) or key in self._parameters[name]:  # a parameter became one, as in a target
                continue
            if held.get(key) is None:
                yield key, f"made with shape {tuple(now.shape)}"
            elif key in shapes and now.shape != shapes[key]:
                yield key, f"of shape {tuple(shapes[key])}, became {tuple(now.shape)}"
        for key in shapes:
            if (
                dict(layer._buffers.items()).get(key) is None
                and key not in vars(layer)
                and key not in layer._parameters
            ):
                yield key, "was taken away"

    def _put_back(self, name: str, layer: nn.Module, key: str) -> None:
        held, now = self._held[name], layer._buffers.get(key)
        if key not in held:
            delattr(layer, key)
            return
        before = held[key]
        if before is not None and before.shape != self._shapes[name][key]:  # it was resized in place
            before = before.new_zeros(self._shapes[name][key])
        if before is not None and now is not None:
            before = before.to(now.device)
        layer._buffers[key] = before


def say_what_is_left_out(kind: str, changes: Mapping[str, str]) -> None:
    """Warn of buffers that have changed their form.

    Args:
        kind: Class of the module.
        changes: What :meth:`BufferForms.restore` returned.
    """
    _log.warning(
        "buffers of %s changed their shapes in a local fit or an evaluation: %s. One shape holds for all clients "
        "and the server, so that these values are neither sent nor saved, and every local fit and evaluation begins "
        "with the first shape. To have them averaged and saved, give register_buffer the final shape in __init__",
        kind,
        "; ".join(f"{name} ({change})" for name, change in changes.items()),
    )
