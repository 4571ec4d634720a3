"""The part of a study that a command runs: ``--seeds``, ``--methods`` and ``--settings``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfl_lightning.errors import UsageError
from pfl_lightning.study.definition.plan import Cell, Run
from pfl_lightning.study.definition.study import Study
from pfl_lightning.text import did_you_mean

__all__ = ["Part", "part_of"]


@dataclass(frozen=True)
class Part:
    """What a command runs of a study; of what is empty, all.

    Attributes:
        seeds: Seeds.
        rows: Names of methods, or labels of rows.
        settings: Names of settings.
    """

    seeds: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def has_cell(self, cell: Cell) -> bool:
        """Whether runs of a cell belong to it."""
        rows = not self.rows or cell.method in self.rows or cell.label in self.rows
        return rows and (not self.settings or cell.setting in self.settings)

    def has(self, run: Run) -> bool:
        """Whether a run belongs to it."""
        return self.has_cell(run.cell) and (not self.seeds or run.seed in self.seeds)


def part_of(study: Study, cells: Sequence[Cell], seeds: str, methods: str, settings: str) -> Part:
    """The part that a command line names, checked against the study.

    Args:
        study: The study.
        cells: All its cells.
        seeds: Seeds, as in "0,1"; empty for all.
        methods: Methods or rows, as in "FedAvg,FedPAC"; empty for all.
        settings: Settings; empty for all.

    Raises:
        UsageError: The study has no such seed, method or setting.
    """
    known = list(dict.fromkeys([*(cell.label for cell in cells), *study.methods]))
    blocks = [name for name in study.settings if name]
    return Part(
        tuple(int(name) for name in _names("--seeds", seeds, [str(seed) for seed in study.seeds], "seed")),
        _names("--methods", methods, known, "method or row"),
        _names("--settings", settings, blocks, "setting"),
    )


def _names(option: str, text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Names divided by commas; a name may have commas itself, so that the longest one that is known is taken."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if text and not words:
        raise UsageError(f"{option} {text!r} names no {what}; leave it out for all")
    spelled = {_spelled(name): name for name in known}
    found: list[str] = []
    while words:
        lengths = range(len(words), 0, -1)
        length = next((length for length in lengths if _spelled(",".join(words[:length])) in spelled), 0)
        if not length:
            meant = did_you_mean(words[0], known)
            has = f"it has {'; '.join(known)}" if known else "it has none"
            raise UsageError(f"{option}: the study has no {what} {words[0]!r}{meant} ({has})")
        found.append(spelled[_spelled(",".join(words[:length]))])
        words = words[length:]
    return tuple(dict.fromkeys(found))


def _spelled(name: str) -> str:
    """A name without spaces at its commas."""
    return ",".join(word.strip() for word in name.split(","))
