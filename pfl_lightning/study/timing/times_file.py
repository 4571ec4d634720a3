"""The file of a study that says how long its runs take, written by several calls at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pfl_lightning.state.files import replace_file
from pfl_lightning.state.run_lock import wait_for_lock

__all__ = ["CellTime", "read_times", "update_times"]


@dataclass(frozen=True)
class CellTime:
    """Time of a cell's runs.

    Attributes:
        per_round: Seconds of a round.
        around: Seconds before the first and after the last round; ``None`` where no run was timed as a whole.
    """

    per_round: float
    around: float | None = None

    def of(self, rounds: int) -> float:
        """Seconds of a run of a number of rounds."""
        return (self.around or 0.0) + rounds * self.per_round


def read_times(path: Path) -> dict[str, CellTime]:
    """The times in a file, by path of the cell; of a file that is missing or damaged, none."""
    try:
        found: Mapping[str, Mapping[str, float | None]] = json.loads(path.read_text())
        return {name: _read(entry) for name, entry in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def update_times(path: Path, measured: Mapping[str, CellTime], known: Mapping[str, CellTime]) -> None:
    """Add times to a file, which keeps what others have written to it meanwhile.

    A full disk, or a folder that cannot be written, is left to those who write more.

    Args:
        path: The file; its folder is made.
        measured: Times that replace those in the file; one that is unknown around the rounds stays there.
        known: Times of cells that the file does not have.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(path.parent):
            earlier = {**known, **read_times(path)}
            times = {**earlier, **{name: _with_around(time, earlier.get(name)) for name, time in measured.items()}}
            with replace_file(path, shared=True) as temporary:  # where there are no locks, others write meanwhile
                temporary.write_text(json.dumps({name: asdict(time) for name, time in times.items()}, indent=1))


def _with_around(time: CellTime, earlier: CellTime | None) -> CellTime:
    """What was measured; of what is around the rounds, perhaps no more than before."""
    return time if time.around is not None or earlier is None else CellTime(time.per_round, earlier.around)


def _read(entry: Mapping[str, float | None]) -> CellTime:
    per_round, around = entry["per_round"], entry.get("around")
    for seconds in (per_round, 0.0 if around is None else around):
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"expected seconds, got {seconds!r}")
    return CellTime(**entry)  # type: ignore[arg-type]  # checked above
