"""What of a user's module travels between clients and server: said before the first round, and watched."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.client.user_module import NETWORKS, bare_name
from pfl_lightning.messages import State
from pfl_lightning.notices import few_of
from pfl_lightning.state.image import content_hash
from pfl_lightning.state.tensors import norm_names

_STATISTICS = ("running_mean", "running_var")
"""Names of buffers that any normalization layer has."""


def what_travels(client: FederatedClient) -> str:
    """Which tensors of the module travel, and what becomes of the others."""
    every = [name for name in client.state_dict() if name.startswith(NETWORKS)]
    sent = set(client.shared_names()) & set(every)
    fixed = set(client.fixed_names()) & set(every)
    frozen = client.frozen & set(every)
    rest = {"with each client": set(every) - sent - fixed - frozen, "at their initial values": fixed, "frozen": frozen}
    number = "all" if len(sent) == len(every) else str(len(sent)) if sent else "none"
    travels = f" ({outline(sent, every)})" if sent and len(sent) < len(every) else ""
    stays = [f"{how}: {outline(names, every)}" for how, names in rest.items() if names]
    return (
        f"{number.capitalize()} of the {len(every)} tensors of {type(client.step_module).__name__} travel between "
        f"clients and server{travels}{'; stay ' if stays else ''}{'; '.join(stays)}"
    )


def outline(names: Collection[str], every: Sequence[str]) -> str:
    """Names, those of a layer whose tensors are all among them as one.

    Args:
        names: Names in a client's state.
        every: All of them.
    """
    chosen, found = set(names), dict[str, None]()
    divided = {prefix for name in every if name not in chosen for prefix in _prefixes(name)}
    for name in every:
        if name in chosen:
            whole = next((f"{prefix}.*" for prefix in _prefixes(name) if prefix not in divided), name)
            found[whole.removeprefix("module.")] = None
    return few_of([*found], 6)


def _prefixes(name: str) -> Iterator[str]:
    """Names of the layers that hold a tensor, the outermost first; not of the user's module itself."""
    parts = name.split(".")
    start = 2 if name.startswith("module.") else 1
    yield from (".".join(parts[:depth]) for depth in range(start, len(parts)))


class AveragedBuffers:
    """Warns once of buffers that local fits change and the server averages, where nobody has asked for that."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # hashes
        self._warned = False

    def begin(self, client: FederatedClient, weights: State) -> None:
        """Training begins: note what the buffers hold.

        Args:
            client: A client.
            weights: What the server sends.
        """
        wanted = set() if self._warned or client.user_module is None else client.user_module.chosen[1]
        passed = norm_names(client, affine=False) | {f"{prefix}{name}" for prefix in NETWORKS for name in wanted}
        buffers = {n for n, b in client.named_buffers() if n.startswith(NETWORKS) and b.is_floating_point()}
        names = [] if self._warned else [n for n in client.shared_names() if n in buffers - passed and n in weights]
        self._first = {name: content_hash(weights[name]) for name in names if not name.endswith(_STATISTICS)}

    def look(self, module: Any, weights: State) -> None:
        """A round is over: warn of what it has changed.

        Args:
            module: The user's module.
            weights: What the server sends.
        """
        found = [name for name, before in self._first.items() if content_hash(weights[name]) != before]
        if not found:
            return
        self._warned, self._first = True, {}
        names = tuple(dict.fromkeys(map(bare_name, found)))
        warnings.warn(
            f"local fits change buffers of {type(module).__name__} that are averaged over the clients: "
            f"{', '.join(names)}. Queues, memory banks and positions in them have no mean: personal={names!r} keeps "
            f"them on each client; shared={names!r} confirms the mean",
            stacklevel=2,
        )
