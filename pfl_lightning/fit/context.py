"""What a local fit knows of its client, its round and its run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.public import PublicSamples
from pfl_lightning.notices import named_clients

Batch = tuple[Tensor, ...]
"""Inputs and labels, and the values attached to the samples, if any are (:meth:`FitData.attach`)."""


@dataclass(frozen=True)
class Citation:
    """Where a method was published."""

    title: str
    authors: str
    venue: str
    year: int


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run as a whole; the federation sets them when a fit, a validation or a test starts.

    Attributes:
        num_participating: Number of clients that take part in the training. Novel clients are not counted.
        num_rounds: Planned number of rounds (``max_epochs`` of the Trainer that fits); ``None`` where it is unlimited,
            and outside of a fit.
        novel: Clients that never train; only the server is told of them.
        gradient_clip_val: Value at which the engine clips gradients; ``None`` where it does not.
        precision: Precision of the Trainer, such as ``"32-true"``.
        names: A name for each client; empty where clients have numbers alone.
    """

    num_participating: int = 0
    num_rounds: int | None = None
    novel: frozenset[int] = frozenset()
    gradient_clip_val: float | None = None
    precision: str = "32-true"
    names: Sequence[str] = ()


@dataclass(frozen=True)
class FitContext:
    """Client, round and data of a local fit, and what is known of the run.

    Attributes:
        client: Number of the client.
        round: Number of the round, from 0.
        data: The client's own training data.
        facts: Facts about the run: number of participating clients and planned number of rounds.
        num_steps: Number of optimizer steps that this fit has taken so far: 0 in :meth:`FederatedClient.before_fit`,
            and those of all phases in :meth:`FederatedClient.make_update`. A step that float16 training skips, since
            its gradient overflowed, is not counted; with several optimizers the steps of all of them are.
        public: The public samples; ``None`` unless the method asks for them (``public_samples``).
        stored: In an evaluation, whether the federation has stored a state of the client: not until its first local fit
            ends, never of novel clients, and never under methods that keep nothing on the client. True in a local fit.
        earlier_fits: Number of local fits that schedules of the learning rate count before this one, see ``schedule``
            of :class:`FederatedClient`; ``None`` where they start at the beginning, as in an evaluation.
        max_steps: Local steps after which the fit ends, in whichever phase and epoch that is: a whole number, or
            infinity for no limit. Inside of a phase those that are left.
        is_cut: Whether the fit has ended there, with batches left.
    """

    client: int
    round: int
    data: FitData
    facts: RunFacts = field(default_factory=RunFacts)
    num_steps: int = 0
    public: PublicSamples | None = None
    stored: bool = True
    earlier_fits: int | None = None
    max_steps: float = math.inf
    is_cut: bool = False

    @property
    def who(self) -> str:
        """The client in messages: ``client 3``, or ``client 3 (Lyon)``."""
        return named_clients([self.client], self.facts.names)

    @property
    def sender(self) -> dict[str, Any]:
        """What an update says of its fit: client, round and number of samples."""
        return {"client": self.client, "round": self.round, "num_samples": self.data.num_samples}

    @property
    def validation(self) -> FitData | None:
        """The client's own validation part, with the settings of the fit; ``None`` if it has none."""
        return self.data.of_validation()
