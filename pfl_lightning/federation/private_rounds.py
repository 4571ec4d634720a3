"""Rounds of a run with privacy: what would make its accounts wrong is refused, and the budget is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.privacy.mechanism import PrivacyMechanism

if TYPE_CHECKING:
    from pfl_lightning.federation.loop import RoundLoop


def check(loop: RoundLoop, samples_itself: bool) -> None:
    """Refuse what would make the accounts of privacy wrong.

    Args:
        loop: The loop of the run.
        samples_itself: Whether its class has a ``sample_cohort`` of its own.

    Raises:
        ConfigurationError: Names it.
    """
    if samples_itself:
        raise ConfigurationError(
            f"{type(loop).__name__}.sample_cohort chooses the clients of a round, but with privacy each takes "
            "part by its own secret draw: do not override sample_cohort, and set their number by cohort"
        )
    if loop.min_clients != 1:
        raise ConfigurationError(
            f"min_clients is {loop.min_clients}, but with privacy a round counts however many take part, since their "
            "number would not be secret otherwise: leave it at 1"
        )


def check_budget(loop: RoundLoop, trainer: L.Trainer, mechanism: PrivacyMechanism) -> None:
    """Refuse rounds that exceed the budget, or end the fit before the first that does.

    Raises:
        ConfigurationError: The planned rounds, or the first one where the run is to end in time, exceed it.
    """
    rates, planned = list[tuple[float, int]](), -1 if trainer.max_epochs is None else trainer.max_epochs
    if planned >= 0:  # else their number is unlimited
        full = loop.full_participation_in_last_round and planned > loop.rounds
        rates = [(sampling_rate(loop, mechanism, -1, planned), planned - loop.rounds - full), (1.0, int(full))]
    mechanism.check_budget(rates, planned)
    stop_in_budget(loop, trainer, mechanism, loop.rounds)


def stop_in_budget(loop: RoundLoop, trainer: L.Trainer, mechanism: PrivacyMechanism, next_round: int) -> None:
    """End the fit where a further round would exceed the budget."""
    rate = sampling_rate(loop, mechanism, next_round, trainer.max_epochs)
    if next_round == trainer.max_epochs or not mechanism.is_exhausted(rate):
        return
    spent = f"{mechanism.rounds} rounds have spent {mechanism.epsilon():.3g}"
    said = f"privacy: one more round would exceed max_epsilon; {spent}"
    if not mechanism.rounds:
        raise ConfigurationError(f"{said}: raise noise_multiplier or max_epsilon, or use smaller cohorts")
    rank_zero_info(said)
    trainer.should_stop = True


def sampling_rate(loop: RoundLoop, mechanism: PrivacyMechanism, round: int, max_rounds: int | None) -> float:
    """Probability with which a client takes part in a round."""
    if loop.full_participation_in_last_round and max_rounds is not None and round == max_rounds - 1:
        return 1.0
    return loop.cohort if isinstance(loop.cohort, float) else loop.cohort / mechanism.num_clients
