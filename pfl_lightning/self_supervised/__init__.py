"""Self-supervised objectives: losses of two views of a batch, without labels.

====================================================================  =============================================
``objective``                                                         ``Objective``, the base of all objectives
``simclr``, ``byol``, ``simsiam``, ``mocov2``, ``swav``, ``smog``     one objective each
``target``                                                            networks that follow by a moving average
====================================================================  =============================================

Heads, losses and memory banks are lightly's (the extra ``ssl``), imported when an objective is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from pfl_lightning.checks import check_choice
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.self_supervised.byol import BYOL
from pfl_lightning.self_supervised.mocov2 import MoCoV2
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput
from pfl_lightning.self_supervised.simclr import SimCLR
from pfl_lightning.self_supervised.simsiam import SimSiam
from pfl_lightning.self_supervised.smog import SMoG
from pfl_lightning.self_supervised.swav import SwAV
from pfl_lightning.self_supervised.target import TargetNetwork

__all__ = ["BYOL", "OBJECTIVES", "MoCoV2", "Objective", "ObjectiveFactory", "ObjectiveOutput"]
__all__ += ["SMoG", "SimCLR", "SimSiam", "SwAV", "TargetNetwork", "make_objective"]

ObjectiveFactory = Callable[[nn.Module], Objective]

OBJECTIVES: Mapping[str, type[Objective]] = MappingProxyType(
    {"simclr": SimCLR, "byol": BYOL, "simsiam": SimSiam, "mocov2": MoCoV2, "swav": SwAV, "smog": SMoG}
)
"""Classes of the objectives, by name."""


def make_objective(choice: str | ObjectiveFactory, encoder: nn.Module) -> Objective:
    """Objective for an encoder.

    Args:
        choice: A name, or a function from the encoder to an objective, such as a class or a ``functools.partial`` of
            one.
        encoder: The client's encoder.

    Raises:
        ValueError: No objective has this name.
        ConfigurationError: The function did not return an objective.
    """
    if isinstance(choice, str):
        check_choice("objective", choice, tuple(OBJECTIVES))
        choice = OBJECTIVES[choice]
    made = choice(encoder)
    if not isinstance(made, Objective):
        raise ConfigurationError(
            f"objective must be one of {tuple(OBJECTIVES)}, or make a pfl_lightning.self_supervised.Objective from the "
            f"encoder; it made a {type(made).__name__}"
        )
    return made
