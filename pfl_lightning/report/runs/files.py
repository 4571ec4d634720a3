"""Files of a run, which may have been cut or changed: what they hold, or an error that names the one."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from pfl_lightning.errors import ConfigurationError

__all__ = ["client_accuracies", "damaged", "read_json"]

ROUNDING = 1e-6
"""By how much the mean of a file of clients may be off the one in the file of results."""


def damaged(path: Path, why: object, without: str = "") -> ConfigurationError:
    """What is said of a file that no run of this package leaves so.

    Args:
        path: The file.
        why: An error, or what is wrong in words.
        without: What the run is read without if the file is removed; empty for a file that a run must have.
    """
    reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    rest = f"repair the file, or remove it: the run is then read without {without}" if without else "or run it again"
    return ConfigurationError(f"{path} is not what a run of this package leaves ({reason}); leave the run out, {rest}")


def read_json(path: Path, without: str = "") -> Any:
    """The content of a file in JSON.

    Args:
        path: The file.
        without: See :func:`damaged`.

    Raises:
        ConfigurationError: It is cut, or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise damaged(path, error, without) from error


def client_accuracies(
    path: Path, column: str, summary: Mapping[str, Any], novel: str | None = None, trained: bool = False
) -> dict[int, float]:
    """Accuracies by client; none where there is no such file.

    Args:
        path: A file with a row for each client.
        column: Name of the accuracies.
        summary: Number and mean of the accuracies, as the file of results has them, which must be those of the rows.
        novel: ``"1"`` for novel clients, ``"0"`` for the others, ``None`` for all.
        trained: Whether clients that never trained are left out.

    Raises:
        ConfigurationError: The file is cut, or has other clients or accuracies than those of the summary.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if novel is None or row["novel"] == novel]
        rows = [row for row in rows if not trained or row["rounds_trained"] != "0"]
        found = {int(row["client"]): float(row[column]) for row in rows if row.get(column)}
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        raise damaged(path, error, "its clients") from error
    number, mean = summary.get("num_clients", len(found)), summary.get("mean")
    if mean is not None and len(found) != number:
        raise damaged(path, f"it has accuracies of {len(found)} clients, the results are of {number}", "its clients")
    if mean is not None and found and abs(fmean(found.values()) - mean) > ROUNDING:  # not of NaN
        why = f"the mean of its accuracies is {fmean(found.values()):.6g}, that of the results {mean:.6g}"
        raise damaged(path, why, "its clients")
    return {client: accuracy for client, accuracy in found.items() if math.isfinite(accuracy)}
