"""What traveled."""

from __future__ import annotations

from pfl_lightning.messages import Message

__all__ = ["Traffic"]


class Traffic:
    """Bytes that traveled, up (clients to server) and down (server to clients), by kind of content."""

    def __init__(self) -> None:
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}

    def count(self, direction: dict[str, int], message: Message) -> None:
        """Add a message to one direction."""
        for kind, size in message.bytes_by_kind().items():
            direction[kind] = direction.get(kind, 0) + size
