"""Parts of a module that its user keeps on the clients, or shares, whatever the method says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.roles import fitting_names, tied_across
from pfl_lightning.errors import ConfigurationError

__all__ = ["ChosenParts"]


@dataclass(frozen=True)
class ChosenParts:
    """The options ``personal`` and ``shared`` of :func:`~pfl_lightning.drop_in.federate.federate`.

    Attributes:
        personal: Names or patterns of layers, parameters or buffers that stay with each client.
        shared: Those that travel.
    """

    personal: str | Sequence[str] = ()
    shared: str | Sequence[str] = ()

    def names_in(self, module: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the module's tensors that stay with each client, and of those that travel.

        Raises:
            ConfigurationError: A pattern fits nothing; a tensor is in both, or under one of two names of it; or a
                shared buffer has no finite values.
        """
        if not self.personal and not self.shared:
            return frozenset(), frozenset()
        names = list(plain_state(module))
        personal = _fitting(module, names, "personal", self.personal)
        shared = _fitting(module, names, "shared", self.shared)
        both = sorted(personal & shared)
        if both:
            raise ConfigurationError(
                f"personal={self.personal!r} and shared={self.shared!r} both name {both[0]} of {type(module).__name__}"
                ": a tensor stays with each client or travels; make one of the patterns narrower"
            )
        unset = [n for n, b in module.named_buffers() if n in shared and not bool(b.isfinite().all())]
        if unset:
            raise ConfigurationError(
                f"shared={self.shared!r} names {unset[0]} of {type(module).__name__}, whose first values are not "
                "finite, so that it has no mean: give it finite first values, or leave it on the clients"
            )
        return personal, shared


def _fitting(module: nn.Module, names: list[str], option: str, patterns: str | Sequence[str]) -> frozenset[str]:
    every = [patterns] if isinstance(patterns, str) else list(patterns)
    scratch = [name for name, _ in module.named_buffers() if name not in names]
    found = frozenset(fitting_names(names, every, option, scratch))
    tied = tied_across(module, found)
    if tied is not None:
        raise ConfigurationError(
            f"{tied[0]} and {tied[1]} are one parameter of {type(module).__name__} (tied weights), and {option}="
            f"{patterns!r} names only one of them: name both or none"
        )
    return found
