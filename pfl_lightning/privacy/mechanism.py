"""The Gaussian mechanism of a run: its secret seed, cohorts, sums, noise, adaptive bound, and what it has spent."""

from __future__ import annotations

import math
import os
import secrets
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.tensor_lists import float64_device
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.privacy.accountant import Spent, accountants, epsilon, rounds_within
from pfl_lightning.privacy.bounding import PRESENCE, contribution, layout_of, mean_update
from pfl_lightning.privacy.options import ClientPrivacy
from pfl_lightning.seeding import Purpose, derive_seed, seeded_generator
from pfl_lightning.server import Aggregator

SEED = "PFL_PRIVACY_SEED"
"""Environment variable with a whole number as secret seed, for tests; without it the operating system gives one."""


class PrivacyMechanism:
    """What a cohort contributes, as the one update that the server receives.

    Noise and cohorts are drawn by a secret seed, which checkpoints have, so that a resume draws the same, and neither
    configs nor results.

    Args:
        options: Bounds, noise and budget.
        server: The server.
        client: A client as it is before the first round.
        num_clients: Number of clients that may take part, m.

    Raises:
        ConfigurationError: An update holds what cannot be bounded, or opacus is missing.
    """

    def __init__(self, options: ClientPrivacy, server: Aggregator, client: FederatedClient, num_clients: int) -> None:
        accountants()
        self.options, self.layout, self.num_clients = options, layout_of(server, client), num_clients
        if options.quantile is not None and not self.layout.weights:
            raise ConfigurationError("privacy: quantile adapts the bound on weights, and clients send none")
        self.delta = num_clients**-1.1 if options.delta is None else options.delta
        if self.delta >= 1:
            raise ConfigurationError("privacy needs at least two clients, got one: leave privacy out")
        if self.delta > 1 / num_clients:
            warnings.warn(
                f"privacy: delta is {self.delta:g}, too large to protect anyone: set it below {1 / num_clients:g}, 1 / "
                "number of clients",
                stacklevel=2,
            )
        self.clip_norm, self.rate = options.clip_norm, 1.0
        self.spent: list[Spent] = []
        given = os.environ.get(SEED)
        self._secret = secrets.randbits(128) if given is None else int(given)
        self.begin()

    def begin(self) -> None:
        """Begin a round, with nothing of one that was interrupted."""
        self._sums: dict[str, Tensor] = {}
        self._below = 0.0

    # ------------------------------------------------------------------ a round

    @property
    def rounds(self) -> int:
        """Rounds that have spent something, those that were undone included."""
        return sum(rounds for _, _, rounds in self.spent)

    @property
    def expected(self) -> float:
        """Expected number of clients of the round, q m."""
        return self.rate * self.num_clients

    def sample(self, rate: float) -> list[int]:
        """Places of the clients of the next round, each with probability q, the rate."""
        self.rate = rate
        rng = np.random.default_rng(derive_seed(self._secret, Purpose.PRIVATE_COHORT, self.rounds))
        return np.flatnonzero(rng.random(self.num_clients) < self.rate).tolist()

    @torch.no_grad()
    def add(self, update: ClientUpdate, sent: Broadcast) -> None:
        """Add what a client contributes, bounded, to the sums of the round."""
        parts, within = contribution(self.layout, update, sent, self.clip_norm, self.options.class_norm)
        for name, part in parts.items():
            total = self._sum(name, part)
            total.add_(part.to(total.device))
        self._below += within - 0.5

    def _sum(self, name: str, like: Tensor) -> Tensor:
        if name not in self._sums:
            self._sums[name] = torch.zeros(like.shape, dtype=torch.float64, device=float64_device(like.device))
        return self._sums[name]

    def multiplier(self) -> float:
        """Noise of each kind of content in units of its sensitivity.

        Kinds share the budget 1 / z^2 evenly; the count of updates within S takes its part before (Andrew et al.,
        Theorem 1), with a sensitivity of 1/2.
        """
        kinds, z = len(self.layout.bounds(1.0, 1.0)), self.options.noise_multiplier
        counted = 0.0 if self.options.quantile is None else (2 * self._count_noise()) ** -2
        return math.sqrt(kinds / (z**-2 - counted))

    def _count_noise(self) -> float:
        """sigma_b, a twentieth of the cohort (Andrew et al.), and enough for a quarter of the budget at most."""
        return max(self.expected / 20, self.options.noise_multiplier)

    @torch.no_grad()
    def release(self, server: Aggregator, sent: Broadcast) -> ClientUpdate | None:
        """The update that stands for the cohort, which may be empty; the round is spent, whatever comes of it.

        Args:
            server: The server that will receive it.
            sent: What the server has sent.
        """
        multiplier, bounds = self.multiplier(), self.layout.bounds(self.clip_norm, self.options.class_norm)
        generator = seeded_generator(self._secret, Purpose.PRIVATE_NOISE, self.rounds)
        for name, shape, device in self._shapes(sent):
            total = self._sum(name, torch.empty(shape, device=device))
            deviation = multiplier * bounds[name.partition(".")[0]]
            total += deviation * torch.randn(shape, generator=generator, dtype=torch.float64).to(total.device)
        least = max(1.0, multiplier * bounds.get(PRESENCE, 0.0))
        norm = self.options.class_norm
        update = mean_update(self.layout, server, sent, self._sums, self.expected, least, norm)
        if self.options.quantile is not None:
            below = self._below + self._count_noise() * float(torch.randn((), generator=generator))
            share = below / self.expected + 0.5
            self.clip_norm *= math.exp(-self.options.clip_rate * (share - self.options.quantile))
        self._spend()
        self.begin()
        return update

    def _shapes(self, sent: Broadcast) -> list[tuple[str, tuple[int, ...], torch.device]]:
        """Sums of a round by name, with shapes and devices, also where nobody took part."""
        layout, cpu = self.layout, torch.device("cpu")
        classes, width = layout.num_classes, layout.width
        found = [(f"weights.{n}", tuple(sent.weights[n].shape), sent.weights[n].device) for n in layout.weights]
        found += [(PRESENCE, (classes,), cpu)] if layout.by_class else []
        found += [(name, (classes, width), cpu) for name in layout.rows]
        if layout.covariances is not None:
            found.append((layout.covariances, (classes, width * (width + 1) // 2), cpu))
        return found

    # ------------------------------------------------------------------ what it has spent

    def _spend(self) -> None:
        z, rounds = self.options.noise_multiplier, 1
        if self.spent and self.spent[-1][:2] == (z, self.rate):
            rounds += self.spent.pop()[2]
        self.spent.append((z, self.rate, rounds))

    def epsilon(self, *further: tuple[float, int]) -> float:
        """Epsilon of the rounds so far, and of further ones by (sampling rate, number)."""
        more = [(self.options.noise_multiplier, rate, rounds) for rate, rounds in further if rounds > 0]
        return epsilon((*self.spent, *more), self.delta, self.options.accountant)

    def is_exhausted(self, rate: float) -> bool:
        """Whether a further round would exceed the budget, and the run is to stop before."""
        most = self.options.max_epsilon
        return self.options.stop and most is not None and self.epsilon((rate, 1)) > most

    def check_budget(self, rates: list[tuple[float, int]], planned: int) -> None:
        """Refuse planned rounds that exceed the budget, unless the run stops before.

        Args:
            rates: Rounds that are left, by (sampling rate, number); empty where their number is unlimited.
            planned: Rounds of the whole run, for the error.

        Raises:
            ConfigurationError: Says what they would spend, and how many rounds fit.
        """
        most, z = self.options.max_epsilon, self.options.noise_multiplier
        if most is None or self.options.stop or (rates and (found := self.epsilon(*rates)) <= most):
            return
        rate = rates[0][0] if rates else self.rate
        fit = rounds_within(self.spent, z, rate, self.delta, most, self.options.accountant)
        said = f"the {planned} rounds planned would spend epsilon {found:.3g}" if rates else "rounds are not limited"
        raise ConfigurationError(
            f"privacy: {said}, and max_epsilon is {most:g} (delta {self.delta:.2g}): with noise_multiplier {z:g} and "
            f"sampling rate {rate:g}, at most {self.rounds + fit} rounds are possible. Lower max_epochs, raise "
            "noise_multiplier, use smaller cohorts, or let the run end early (stop=True)"
        )

    def metrics(self) -> dict[str, float]:
        """What is logged of a round."""
        clip = {"privacy/clip_norm": self.clip_norm} if self.layout.weights else {}
        return {"privacy/epsilon": self.epsilon(), **clip}

    def facts(self) -> dict[str, Any]:
        """What results say."""
        options = self.options
        return {
            "epsilon": self.epsilon(),
            "delta": self.delta,
            "accountant": options.accountant,
            "noise_multiplier": options.noise_multiplier,
            "sampling_rate": self.rate,
            "rounds": self.rounds,
            "clip_norm": self.clip_norm if self.layout.weights else None,
            "class_norm": options.class_norm if self.layout.by_class else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """The secret seed, what was spent, and the bound, for the checkpoint."""
        spent = [list(one) for one in self.spent]
        return {"secret": hex(self._secret), "spent": spent, "clip_norm": self.clip_norm, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; the noise may change from there on, and counts as it was."""
        self._secret = int(state["secret"], 16)
        self.spent = [(float(z), float(rate), int(rounds)) for z, rate, rounds in state["spent"]]
        self.clip_norm, self.rate = state["clip_norm"], state["rate"]
