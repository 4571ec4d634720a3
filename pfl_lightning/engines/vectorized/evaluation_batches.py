"""The parts that clients are evaluated on, cut into pieces that go through one forward pass together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_lightning.data import SplitSource
from pfl_lightning.engines.tasks import EvaluationTask

__all__ = ["Piece", "PieceBatch", "gather", "groups_of", "pieces_of"]

WIDEST = 2
"""How many times its own size a piece is padded to at most."""


@dataclass(frozen=True)
class Piece:
    """Consecutive samples of a client's part.

    Attributes:
        row: The client's row in the stack.
        part: 0 for the validation part, 1 for the test part.
        samples: The samples.
        size: How many they are.
    """

    row: int
    part: int
    samples: SplitSource
    size: int


@dataclass(frozen=True)
class PieceBatch:
    """Pieces of different clients, side by side.

    Attributes:
        pieces: The pieces, R of them.
        inputs: Of all, (R, S, ...).
        labels: Of all, (R, S).
    """

    pieces: Sequence[Piece]
    inputs: Tensor
    labels: Tensor

    @property
    def valid(self) -> Tensor | None:
        """Which samples are the pieces' own, (R, S); ``None`` if all are."""
        width = self.labels.shape[1]
        if all(piece.size == width for piece in self.pieces):
            return None
        sizes = torch.tensor([piece.size for piece in self.pieces], device=self.labels.device)
        return torch.arange(width, device=self.labels.device) < sizes[:, None]


def pieces_of(row: int, task: EvaluationTask) -> list[Piece]:
    """The pieces of a client, of the size of an evaluation batch, largest first."""
    found = [
        Piece(row, index, samples, len(samples))
        for index, part in enumerate((task.validation, task.test))
        if part is not None and len(part)
        for samples in part.split(task.context.data.eval_batch_size)
    ]
    return sorted(found, key=lambda piece: -piece.size)


def groups_of(pieces: Sequence[Piece], limit: int, pad: bool) -> list[list[Piece]]:
    """Put pieces of different clients together.

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
    """Fetch the samples of a group; those of different shapes come apart."""
    shapes: dict[object, list[tuple[Piece, Tensor, Tensor]]] = {}
    for piece in pieces:
        inputs, labels = piece.samples.loader(piece.size, device=device).tensors()
        shapes.setdefault((inputs.shape[1:], inputs.dtype), []).append((piece, inputs, labels))
    for alike in shapes.values():
        width = max(piece.size for piece, _, _ in alike)
        inputs = _padded([own for _, own, _ in alike], width)
        yield PieceBatch([piece for piece, _, _ in alike], inputs, _padded([own for _, _, own in alike], width))


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Put (n_k, ...) together to (R, S, ...), with the last sample of each in the places that are left."""
    found = rows[0].new_empty((len(rows), width, *rows[0].shape[1:]))
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
        place[len(row) :] = row[-1]
    return found
