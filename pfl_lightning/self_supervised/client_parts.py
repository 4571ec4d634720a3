"""What clients with an objective have in common, as functions."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from pfl_lightning.client import Batch, Phase
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput

__all__ = ["fitting_phases", "learn_from_views", "objective_phases", "objective_shared", "sum_of_terms"]


def objective_shared(objective: Objective) -> tuple[str, ...]:
    """Patterns of what travels: the encoder, and what the objective says. The head stays."""
    return ("encoder.*", *(f"objective.{pattern}" for pattern in objective.shared))


def objective_phases(epochs: int) -> tuple[Phase, ...]:
    """One phase that trains the encoder and the objective; the head waits for the personalization."""
    return (Phase("self_supervised", ("encoder.*", "objective.*"), epochs),)


def fitting_phases(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The phases of a personalization, which go on single views without augmentation: there a head is fitted."""
    return tuple(replace(phase, plain=True) for phase in phases)


def learn_from_views(objective: Objective, encoder: nn.Module, batch: Batch) -> ObjectiveOutput:
    """The objective's output for a batch with two views, inputs of shape (B, 2, ...); labels play no part."""
    first, second = batch[0].unbind(1)
    output: ObjectiveOutput = objective(encoder, first, second)
    return output


def sum_of_terms(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a training step returns: the sum of the terms, and each of them detached."""
    loss = cast(Tensor, sum(terms.values()))
    return {"loss": loss} | {name: term.detach() for name, term in terms.items()}
