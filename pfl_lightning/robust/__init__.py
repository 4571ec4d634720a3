"""Robust aggregation: rules that a few lying clients cannot lead where they want, as an option of a run.

``rules`` has what a round asks, and the rules for servers that average; ``filters`` those that leave whole updates out.
"""

from pfl_lightning.robust.filters import Krum, MultiKrum
from pfl_lightning.robust.rules import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    NormClipping,
    Robust,
    TrimmedMean,
)

__all__ = ["CenteredClipping", "CoordinateMedian", "GeometricMedian", "Krum", "MultiKrum", "NormClipping", "Robust"]
__all__ += ["TrimmedMean"]
