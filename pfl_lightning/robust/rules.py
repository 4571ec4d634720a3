"""What a round asks of a robust rule, and the rules that take the place of an average."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.numerics import at_least_single, in_double
from pfl_lightning.functional.robust import (
    centered_clipping_weights,
    coordinate_median,
    geometric_median_weights,
    trimmed_mean,
)
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.names import described
from pfl_lightning.server import Aggregator

FILTER = "MultiKrum(byzantine=f), a filter in front of the server, which judges whole updates"


class Entry(NamedTuple):
    """An update that the round has checked, and the broadcast that it answers."""

    update: ClientUpdate
    sent: Broadcast


Verdict = ClientUpdate | str
"""What the server is to receive of a client, or why its update is left out."""


class Robust:
    """Base of the rules: what a round does with its updates before the server receives them.

    A rule keeps nothing from round to round, so that a resumed run does what the uninterrupted one does.

    Args:
        max_norm: Bound on how far the weights of an update may lie from those that were sent, over all of them: what
            lies farther is scaled back, before everything else. ``None`` for no bound.
    """

    holds: ClassVar[bool] = True
    """Whether the updates of a round are held until its end."""

    __repr__ = described

    def __init__(self, max_norm: float | None = None) -> None:
        check_number("max_norm", max_norm, strict=True, optional=True)
        self.max_norm = max_norm

    def least(self, refused: int) -> int:
        """Number of updates that a round needs.

        Args:
            refused: Updates of the round that were no valid messages, or lie too far from all others: each counts as
                one of a Byzantine client.
        """
        return 1

    def judge(self, entries: Sequence[Entry], refused: int) -> Sequence[Verdict]:
        """Judge the updates of a cohort, of which there are as many as :meth:`least` says, in their order."""
        return [entry.update for entry in entries]

    def check_server(self, server: Aggregator, method: str) -> None:
        """Refuse a server that the rule does not apply to.

        Raises:
            ConfigurationError: Says why, and what to take instead.
        """
        declared = type(server).update_class.__dataclass_fields__.values()
        if not server.expected_weights and not [one for one in declared if "schema" in one.metadata][1:]:
            raise ConfigurationError(f"{self!r} has nothing to judge: clients of {method} send no updates")
        if self.max_norm is not None and not server.expected_weights:
            raise ConfigurationError(f"max_norm bounds weights, and clients of {method} send none; use {FILTER}")

    def check_cohort(self, size: int, server: Aggregator) -> None:
        """Refuse a cohort that is too small for the rule, or whose updates are more than the memory.

        Raises:
            ConfigurationError: Says how many clients are needed, or how many gigabytes.
        """
        if size < self.least(0):
            raise ConfigurationError(
                f"{self!r} needs cohorts of at least {self.least(0)} clients, a round has {size}: enlarge the cohort, "
                "or expect fewer Byzantine clients"
            )
        if not self.holds:
            return
        sizes = [
            math.prod(getattr(w, "shape", w)) * getattr(w, "itemsize", 4) for w in server.expected_weights.values()
        ]
        device = next((t.device for t in (*server.parameters(), *server.buffers())), torch.device("cpu"))
        held, limit = size * sum(sizes), memory_of(device)
        said = f"{type(self).__name__} holds the {size} updates of a round, {held / 1e9:.3g} GB of weights"
        if held > limit:
            raise ConfigurationError(f"{said}, and {device} has {limit / 1e9:.3g} GB: choose a smaller cohort")
        rank_zero_info(said)

    def bounded(self, update: ClientUpdate, sent: Broadcast) -> ClientUpdate:
        """The update with its weights scaled back to ``max_norm``, w + (w_k - w) min(1, M / |w_k - w|)."""
        steps = {} if self.max_norm is None else steps_of(Entry(update, sent))
        norm = math.hypot(*(torch.linalg.vector_norm(step).item() for step in steps.values()))
        if self.max_norm is None or norm <= self.max_norm:
            return update
        before, factor = {name: tensor for name, _, tensor in sent.tensors()}, self.max_norm / norm
        return update.with_named({n: moved(before[n], factor * step) for n, step in steps.items()})


class NormClipping(Robust):
    """The server's own average, of updates that are bounded: Delta_k / max(1, |Delta_k| / M) (Sun et al., 2019).

    Nothing is held. Statistics that updates have beside weights are as they came.

    Args:
        max_norm: M.
    """

    holds = False

    def __init__(self, max_norm: float) -> None:
        super().__init__(max_norm)


class AverageRule(Robust):
    """Base of rules that take the place of a server's average: of updates that hold nothing but weights.

    Every update is replaced by the rule's result before the server averages, and the average of equal things is that
    thing, whatever their weights. A server's optimizer steps from there.
    """

    def check_server(self, server: Aggregator, method: str) -> None:
        """Refuse a server that does more than average weights."""
        super().check_server(server, method)
        if type(server).update_class is not ClientUpdate or not server.takes_mean():
            raise ConfigurationError(
                f"{self!r} replaces an average, but the server of {method} does more than average the clients' "
                f"weights: use {FILTER}"
            )

    def judge(self, entries: Sequence[Entry], refused: int) -> Sequence[Verdict]:
        """Replace all updates by the rule's result."""
        found = self.combine(entries, refused)
        return [replace(entry.update, weights=found) for entry in entries]

    def combine(self, entries: Sequence[Entry], refused: int) -> dict[str, Tensor]:
        """The weights that take the place of the average."""
        raise NotImplementedError


class CoordinateRule(AverageRule):
    """Base of rules for each number by itself."""

    def combine(self, entries: Sequence[Entry], refused: int) -> dict[str, Tensor]:
        """The rule for each number; the lower median of counters."""
        found = {}
        for name, tensor in entries[0].update.weights.items():
            values = torch.stack([entry.update.weights[name] for entry in entries])
            if values.is_floating_point():
                found[name] = self.of_values(at_least_single(values), refused).to(tensor.dtype)
            else:
                found[name] = _lower_median(values)
        return found

    def of_values(self, values: Tensor, refused: int) -> Tensor:
        """The rule over the first axis."""
        raise NotImplementedError


class CoordinateMedian(CoordinateRule):
    """The median of each number over the clients (Yin et al., 2018, Algorithm 1, option I)."""

    def of_values(self, values: Tensor, refused: int) -> Tensor:
        """The median."""
        return coordinate_median(values)


class TrimmedMean(CoordinateRule):
    """The mean of each number without its f smallest and largest (Yin et al., 2018, Algorithm 1, option II).

    Args:
        byzantine: f, how many clients of a cohort may lie; beta of the paper is f / m. Less than half of them.
        max_norm: See :class:`Robust`.
    """

    def __init__(self, byzantine: int, max_norm: float | None = None) -> None:
        super().__init__(max_norm)
        check_at_least("byzantine", byzantine, 0)
        self.byzantine = byzantine

    def least(self, refused: int) -> int:
        """One more than twice those that may still lie."""
        return 2 * max(self.byzantine - refused, 0) + 1

    def of_values(self, values: Tensor, refused: int) -> Tensor:
        """The trimmed mean."""
        return trimmed_mean(values, max(self.byzantine - refused, 0))


class VectorRule(AverageRule):
    """Base of rules whose result is a combination of whole updates, sum_k a_k Delta_k, by their inner products."""

    def combine(self, entries: Sequence[Entry], refused: int) -> dict[str, Tensor]:
        """The combination; the lower median of counters."""
        steps = [steps_of(entry) for entry in entries]
        gram: Any = 0
        for name in steps[0]:
            rows = torch.stack([step[name].flatten() for step in steps])
            gram = gram + in_double(rows @ rows.T).cpu()
        samples = torch.tensor([float(entry.update.num_samples) for entry in entries], dtype=torch.float64)
        weights = self.weights(gram, samples / samples.sum()).tolist()
        found, before = {}, {name: tensor for name, _, tensor in entries[0].sent.tensors()}
        for name in entries[0].update.weights:
            full = f"weights.{name}"
            if full in steps[0]:
                step: Any = sum(a * in_double(one[full]) for a, one in zip(weights, steps, strict=True))
                found[name] = moved(before[full], step)
            else:
                found[name] = _lower_median(torch.stack([entry.update.weights[name] for entry in entries]))
        return found

    def weights(self, gram: Tensor, shares: Tensor) -> Tensor:
        """a, (m,), from inner products of the updates, (m, m), and the clients' shares of all samples, (m,)."""
        raise NotImplementedError


class GeometricMedian(VectorRule):
    """The smoothed geometric median of whole updates, weighted by samples (RFA, Pillutla et al., 2022, Algorithm 2).

    Args:
        smoothing: nu, the least distance that counts.
        steps: R, steps of Weiszfeld's algorithm; the paper takes 3.
        max_norm: See :class:`Robust`.
    """

    def __init__(self, smoothing: float = 1e-6, steps: int = 3, max_norm: float | None = None) -> None:
        super().__init__(max_norm)
        check_number("smoothing", smoothing, strict=True)
        check_at_least("steps", steps, 1)
        self.smoothing, self.steps = smoothing, steps

    def weights(self, gram: Tensor, shares: Tensor) -> Tensor:
        """beta_k / sum beta_k."""
        return geometric_median_weights(gram, shares, self.smoothing, self.steps)


class CenteredClipping(VectorRule):
    """Updates are clipped around the last model, which was the last result (Karimireddy et al., 2021, Algorithm 2).

    Args:
        radius: tau, how far one update can move the result is tau / m a step; ``None`` takes the median distance.
        steps: Clipping steps, each around the result of the one before.
        max_norm: See :class:`Robust`.
    """

    def __init__(self, radius: float | None = None, steps: int = 1, max_norm: float | None = None) -> None:
        super().__init__(max_norm)
        check_number("radius (tau)", radius, strict=True, optional=True)
        check_at_least("steps", steps, 1)
        self.radius, self.steps = radius, steps

    def weights(self, gram: Tensor, shares: Tensor) -> Tensor:
        """The weights after the last step, from v = 0: no change of the last model."""
        return centered_clipping_weights(gram, self.radius, self.steps)


# ---------------------------------------------------------------------- tensors


def steps_of(entry: Entry, sent_alone: bool = True) -> dict[str, Tensor]:
    """How far named tensors lie from those of their names in the broadcast, in single precision at least.

    Args:
        entry: The update and the broadcast.
        sent_alone: Whether tensors without counterpart are left out; otherwise they are as they came.
    """
    before = {name: tensor for name, _, tensor in entry.sent.tensors()}
    found = {}
    for name, _, tensor in entry.update.tensors():
        old = before.get(name)
        known = old is not None and old.shape == tensor.shape
        if "." in name and tensor.is_floating_point() and (known or not sent_alone):
            own = at_least_single(tensor)
            found[name] = own - old.to(own) if old is not None and known else own
    return found


def moved(before: Tensor, step: Tensor) -> Tensor:
    """A tensor after a step, in its own type and on its device."""
    return (in_double(before) + in_double(step)).to(before)


def memory_of(device: torch.device) -> float:
    """Bytes of memory that a device has; infinite where that is not known."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    known = device.type == "cpu" and hasattr(os, "sysconf")
    return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES") if known else math.inf


def _lower_median(values: Tensor) -> Tensor:
    return values.sort(dim=0).values[(len(values) - 1) // 2]
