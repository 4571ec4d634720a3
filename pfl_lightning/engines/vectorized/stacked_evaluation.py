"""Vectorized forward passes of many clients over pieces of their own parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import SplitSource
from pfl_lightning.engines.generators import GeneratorStates
from pfl_lightning.engines.lifecycle import SplitMetrics, local_fit
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, explained, guarded_attributes
from pfl_lightning.engines.vectorized.stack import Member, Stack, places_of
from pfl_lightning.fit.tasks import EvaluationTask, FitEnvironment
from pfl_lightning.functional.numerics import hits
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.seeding import torch_seed

__all__ = ["Piece", "PieceBatch", "gather", "groups_of", "pieces_of", "score_stack"]

WIDEST = 2
"""Largest ratio of the padded size of a piece to its own size."""


@dataclass(frozen=True)
class Piece:
    """Consecutive samples of a client's part.

    Attributes:
        row: The client's row in the stack.
        part: 0 for the validation part, 1 for the test part.
        samples: The samples.
        size: Number of samples.
    """

    row: int
    part: int
    samples: SplitSource
    size: int


@dataclass(frozen=True)
class PieceBatch:
    """Pieces of different clients, stacked and padded to one size S.

    Attributes:
        pieces: The pieces, R of them.
        inputs: Inputs of all pieces, (R, S, ...).
        labels: Labels of all pieces, (R, S).
    """

    pieces: Sequence[Piece]
    inputs: Tensor
    labels: Tensor

    @property
    def valid(self) -> Tensor | None:
        """Mask of the samples that are no padding, (R, S); ``None`` if all are."""
        width = self.labels.shape[1]
        if all(piece.size == width for piece in self.pieces):
            return None
        sizes = torch.tensor([piece.size for piece in self.pieces], device=self.labels.device)
        return torch.arange(width, device=self.labels.device) < sizes[:, None]


def pieces_of(row: int, task: EvaluationTask) -> list[Piece]:
    """Pieces of a client, of the size of an evaluation batch, largest first."""
    found = [
        Piece(row, index, samples, len(samples))
        for index, part in enumerate((task.validation, task.test))
        if part is not None and len(part)
        for samples in part.split(task.context.data.eval_batch_size)
    ]
    return sorted(found, key=lambda piece: -piece.size)


def groups_of(pieces: Sequence[Piece], limit: int, pad: bool) -> list[list[Piece]]:
    """Groups of pieces of different clients.

    Args:
        pieces: One piece a client.
        limit: Samples that a group has at most, the padding included (a single piece may have more).
        pad: Whether smaller pieces are padded; otherwise only those of one size go together.
    """
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        if groups:
            group, width = groups[-1], groups[-1][0].size
            alike = piece.size * WIDEST >= width if pad else piece.size == width
            if alike and (len(group) + 1) * width <= limit:
                group.append(piece)
                continue
        groups.append([piece])
    return [sorted(group, key=lambda piece: piece.row) for group in groups]


def gather(pieces: Sequence[Piece], device: torch.device) -> Iterator[PieceBatch]:
    """Batches of a group's samples; samples of different shapes are in separate batches."""
    shapes: dict[object, list[tuple[Piece, Tensor, Tensor]]] = {}
    for piece in pieces:
        inputs, labels = piece.samples.loader(piece.size, device=device).tensors()
        shapes.setdefault((inputs.shape[1:], inputs.dtype), []).append((piece, inputs, labels))
    for alike in shapes.values():
        width = max(piece.size for piece, _, _ in alike)
        inputs = _padded([own for _, own, _ in alike], width)
        yield PieceBatch([piece for piece, _, _ in alike], inputs, _padded([own for _, _, own in alike], width))


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Stack rows (n_k, ...) to (R, S, ...), padded with the last sample of each."""
    found = rows[0].new_empty((len(rows), width, *rows[0].shape[1:]))
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
        place[len(row) :] = row[-1]
    return found


TRIED = 8
"""Samples on which padding is tried."""

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def score_stack(client: FederatedClient, members: Sequence[Member], environment: FitEnvironment) -> list[SplitMetrics]:
    """Scores of clients on their parts; the same as those of :func:`score_part`, up to rounding.

    Args:
        client: The module, in evaluation mode; its own tensors play no part.
        members: Clients of one kind.
        environment: Settings of the outer Trainer.

    Raises:
        CannotVectorizeError: The client's forward pass cannot be vectorized.
    """
    tasks = [cast(EvaluationTask, member.task) for member in members]
    states, drawn = _States(members), GeneratorStates.read(environment.device)
    try:
        with local_fit(environment), guarded_attributes(client) as refuse_changes:
            scores = _StackedScores(client, states, environment).scores(tasks)
            refuse_changes("forward")
            if not GeneratorStates.read(environment.device).is_as(drawn):  # seeded for each client, one by one
                raise CannotVectorizeError(f"an evaluation of {type(client).__name__} draws random numbers")
    finally:
        for row, member in enumerate(members):
            member.state = states.row(row)
    return scores


class _States:
    """States of clients; tensors equal for all of them are held once, so that they are applied to all at once.

    Args:
        members: The clients, whose states move into this object.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        tensors = Stack(members, keep_layout=True).tensors
        self._names = list(tensors)
        self.shared: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        for name in self._names:
            tensor = tensors.pop(name)
            if bool((tensor == tensor[:1]).all()):
                self.shared[name] = tensor[0].clone()
            else:
                self._own[name] = tensor.contiguous()

    def own(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Tensors that differ between clients, of some clients, (R, ...)."""
        first, end = rows[0], rows[0] + len(rows)
        if list(rows) == list(range(first, end)):
            return {name: tensor[first:end] for name, tensor in self._own.items()}
        return {
            name: tensor.index_select(0, torch.tensor(rows, device=tensor.device)) for name, tensor in self._own.items()
        }

    def row(self, row: int) -> dict[str, Tensor]:
        """All of one client; not copied."""
        return {name: self.shared[name] if name in self.shared else self._own[name][row] for name in self._names}


class _StackedScores:
    """The passes over the parts of many clients.

    Args:
        client: The module, in evaluation mode.
        states: The clients' states.
        environment: Settings of the outer Trainer.
    """

    def __init__(self, client: FederatedClient, states: _States, environment: FitEnvironment) -> None:
        self._client, self._states, self._environment = client, states, environment
        self._module, self._places = _Forward(client), places_of(client)

    def scores(self, tasks: Sequence[EvaluationTask]) -> list[SplitMetrics]:
        """Scores of the clients, in order."""
        device, places = self._environment.device, 2 * len(tasks)
        right = torch.zeros(places, dtype=torch.int64, device=device)
        losses = torch.zeros(places, dtype=torch.float32, device=device)
        for pieces in self._groups(tasks):
            for batch in gather(pieces, device):
                index = torch.tensor([2 * piece.row + piece.part for piece in batch.pieces], device=device)
                for total, found in zip((right, losses), self._score(batch), strict=True):
                    total.index_add_(0, index, found)
        numbers = zip(right.tolist(), losses.tolist(), strict=True)
        sizes = [0 if part is None else len(part) for task in tasks for part in (task.validation, task.test)]
        every = [EvalMetrics(r / n, loss / n, n) if n else None for (r, loss), n in zip(numbers, sizes, strict=True)]
        return list(zip(every[::2], every[1::2], strict=True))

    def _groups(self, tasks: Sequence[EvaluationTask]) -> Iterator[list[Piece]]:
        """The largest piece of every client, then the second of those that have one, and so on; in groups.

        A group has no more samples than a training step of all clients, or than an evaluation batch.
        """
        limit = max(
            sum(task.context.data.batch_size for task in tasks), *(task.context.data.eval_batch_size for task in tasks)
        )
        every = [pieces_of(row, task) for row, task in enumerate(tasks)]
        turns = [[piece for piece in turn if piece is not None] for turn in zip_longest(*every)]
        differ = next((turn for turn in turns if len({piece.size for piece in turn}) > 1), None)
        pad = differ is not None and self._may_pad(max(differ, key=lambda piece: piece.size))
        for turn in turns:
            yield from groups_of(turn, limit, pad)

    def _may_pad(self, piece: Piece) -> bool:
        """Whether a sample's scores are independent of the other samples of its batch.

        They are not where a layer uses batch statistics in evaluation. NaN spreads through arithmetic, so that padding
        by rows of NaN shows a dependence; comparisons between samples show in the values.
        """
        samples = next(iter(piece.samples.split(TRIED)))
        inputs, _ = samples.loader(TRIED, device=self._environment.device).tensors()
        inputs = self._environment.precision.convert_input(inputs)
        if not inputs.is_floating_point():
            return False
        state = {name: tensor.clone() for name, tensor in self._states.row(piece.row).items()}
        with torch_seed(0), explained(self._client, "forward"):
            alone = self._scores(state, {}, inputs)
            padded = self._scores(state, {}, torch.cat([inputs, torch.full_like(inputs, torch.nan)]))[: len(inputs)]
        near = 0.01 * float(alone.abs().amax())
        return bool(torch.isfinite(padded).all()) and torch.allclose(padded, alone, rtol=0.01, atol=near)

    def _score(self, batch: PieceBatch) -> tuple[Tensor, Tensor]:
        """Number of correctly classified samples of each piece, and the sum of their cross entropies, (R,) each."""
        given = self._states.own([piece.row for piece in batch.pieces]), self._states.shared
        versions = [{name: tensor._version for name, tensor in tensors.items()} for tensors in given]
        with explained(self._client, "forward"):
            found = vmap(self._score_one, in_dims=(0, None, 0, 0), randomness="error")(
                *given, self._environment.precision.convert_input(batch.inputs), batch.labels
            )
        for tensors, before in zip(given, versions, strict=True):
            for name, tensor in tensors.items():
                if tensor._version != before[name]:
                    raise _changed(self._client, name)
        valid = batch.valid
        right, losses = found if valid is None else (values.masked_fill(~valid, 0) for values in found)
        return right.sum(1), losses.sum(1)

    def _score_one(self, own: Tensors, shared: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(own, shared, inputs)
        return hits(scores, labels), F.cross_entropy(scores.float(), labels, reduction="none")

    def _scores(self, own: Tensors, shared: Tensors, inputs: Tensor) -> Tensor:
        state = {**own, **shared}
        given = {f"client.{place}": state[name] for place, name in self._places.items()}
        with self._environment.precision.forward_context():
            scores: Tensor = functional_call(self._module, given, (inputs,), tie_weights=False)
        return scores


class _Forward(nn.Module):
    """The client's forward pass, which must leave its buffers alone."""

    def __init__(self, client: FederatedClient) -> None:
        super().__init__()
        self.client = client

    def forward(self, inputs: Tensor) -> Tensor:
        before = dict(self.client.named_buffers())
        scores: Tensor = self.client(inputs)
        for name, buffer in self.client.named_buffers():
            if buffer is not before.get(name):
                raise _changed(self.client, name)
        return scores


def _changed(client: FederatedClient, name: str) -> CannotVectorizeError:
    return CannotVectorizeError(f"{type(client).__name__}.forward changes {name!r}")
