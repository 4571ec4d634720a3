"""What methods cost and serve, as ``benchmarks/method_costs.py`` measured it; kept in ``costs.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILE", "MethodCosts", "read_costs"]

FILE = Path(__file__).with_name("costs.json")


@dataclass(frozen=True)
class MethodCosts:
    """Measured costs of a method; ratios are to FedAvg with the same settings.

    Attributes:
        method: Name of the class.
        down: What the server sends a client: modules of the model, and fields beside them.
        up: What a client sends.
        down_bytes: Bytes to a client in a round.
        up_bytes: Bytes from a client in a round.
        client_bytes: Bytes that are stored of a client from round to round.
        server_bytes: Bytes of the server's state.
        server_bytes_per_client: Bytes that the server keeps of each client beside it.
        work: Operations of a round's forward and backward passes, as a ratio.
        time: Time of a round, as a ratio; ``None`` where it was not measured.
        overhead: Time of a round over that of its passes in a plain loop, or ``None``.
        overhead_long: The same where a client takes more steps: FedPAC's 600 images and 5 epochs, or ``None``.
        unequal_encoders: Whether two encoders of one feature width train together.
        novel_accuracy: Test accuracy in [0, 1] of clients that never train, on ten classes, after ten rounds at one
            rate for all methods, without a personalization.
        measured: Day and machine.
    """

    method: str
    down: list[str]
    up: list[str]
    down_bytes: int
    up_bytes: int
    client_bytes: int
    server_bytes: int
    server_bytes_per_client: int
    work: float
    time: float | None
    overhead: float | None
    unequal_encoders: bool
    novel_accuracy: float
    measured: str = ""
    overhead_long: float | None = None


def read_costs() -> dict[str, MethodCosts]:
    """The measured methods by name."""
    rows = json.loads(FILE.read_text())["rows"] if FILE.is_file() else []
    return {row["method"]: MethodCosts(**row) for row in rows}
