"""Batches of an evaluation: clients' parts cut into pieces, several of which go through one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_lightning.data import SplitSource
from pfl_lightning.fit.tasks import EvaluationTask

__all__ = ["Piece", "PieceBatch", "gather", "groups_of", "pieces_of"]

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
