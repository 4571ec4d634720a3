"""Where a run lies in the folder of a study, whose names of settings and rows are those of its folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NO_SETTING", "StudyPlace", "folder_name", "study_place"]

NO_SETTING = "all"
"""The folder of the runs of a study without settings."""


def folder_name(label: str) -> str:
    """The folder of a setting or a row of a study.

    Example:
        >>> folder_name("HypCluster, 3")
        'HypCluster-3'
    """
    return re.sub(r"[^\w.=+-]+", "-", label).strip("-.")


@dataclass(frozen=True)
class StudyPlace:
    """What a study calls a run.

    Attributes:
        study: Folder of the study.
        setting: The setting, as its folder is called; empty for a study without settings.
        row: The row, as its folder is called.
    """

    study: Path
    setting: str
    row: str


def study_place(folder: Path) -> StudyPlace | None:
    """The place of a run's folder, ``STUDY/runs/SETTING/ROW/seed_S/version_N``; ``None`` if it is none of a study.

    Args:
        folder: The run's folder.
    """
    seed = folder.resolve().parent
    if not (re.fullmatch(r"seed_\d+", seed.name) and (seed / "run.yaml").is_file() and len(seed.parents) > 3):
        return None
    row, setting, runs, study = seed.parents[:4]
    if runs.name != "runs":
        return None
    return StudyPlace(study, "" if setting.name == NO_SETTING else setting.name, row.name)
