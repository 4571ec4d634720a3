"""Watch over Ray's own processes, without which this process would be ended by Ray, or wait without an end."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Mapping
from typing import Any

from pfl_lightning.errors import FederationError

__all__ = ["Services"]

SILENCE = 30.0
"""Seconds without an answer after which a service of a cluster is given up; Ray ends this process after 60."""

INTERVAL = 1.0
"""Seconds between two knocks."""


class Services:
    """Services of Ray by name and address; those of a connection by :meth:`of`.

    Args:
        addresses: Host and port of each service.
        own: Whether Ray was started by this process, so that nobody starts its services again.

    Attributes:
        lost: Whether a service has died; calls of Ray may then end this process.
    """

    def __init__(self, addresses: Mapping[str, tuple[str, int]], own: bool = False) -> None:
        self._addresses, self._own = addresses, own
        self._last = time.monotonic()
        self._answered = dict.fromkeys(addresses, self._last)
        self.lost = False

    @classmethod
    def of(cls, ray: Any, own: bool) -> Services:
        """Global control service of the cluster, and raylet of this machine, of a connected ``ray``.

        None of a connection by ``ray://``, which is one to another process that is connected.
        """
        from ray.util.client import ray as client

        if client.is_connected():
            return cls({}, own)
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        addresses = {"global control service (gcs_server)": (host.strip("[]"), int(port))}
        for node in ray.nodes():
            if node["NodeID"] == context.get_node_id():
                addresses["raylet"] = (node["NodeManagerAddress"], node["NodeManagerPort"])
        return cls(addresses, own)

    def warn_if_reachable(self) -> None:
        """Say so if other machines may reach services that are for this process alone."""
        hosts = {host for host, _ in self._addresses.values() if not host.startswith("127.")} - {"::1", "localhost"}
        if self._own and hosts:
            warnings.warn(
                f"Ray's processes of this run can be reached from other machines, at {', '.join(sorted(hosts))}: keep "
                "them out by a firewall, or unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER if it is set",
                stacklevel=4,
            )

    def check(self, now: bool = False) -> None:
        """Knock at the services.

        Args:
            now: Whether to knock although the last time is less than a second ago.

        Raises:
            FederationError: One of them has died.
        """
        if not now and time.monotonic() - self._last < INTERVAL:
            return
        for name, (host, port) in self._addresses.items():
            try:
                socket.create_connection((host, port), timeout=5.0).close()
                self._answered[name] = time.monotonic()
            except OSError as error:
                # A machine under load may not answer in time; a refusal means that no process listens.
                patience = 0.0 if self._own and isinstance(error, ConnectionRefusedError) else SILENCE
                if time.monotonic() - self._answered[name] > patience:
                    self.lost = True
                    raise FederationError(
                        f"Ray's {name} at {host}:{port} has died ({error}): the workers are lost, and what was not in "
                        "a checkpoint. Resume with --ckpt_path last; if the system killed it for lack of memory, use "
                        "fewer workers"
                    ) from error
        self._last = time.monotonic()
