"""Filters in front of any server: whole updates are scored, and the worst are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.functional.numerics import in_double
from pfl_lightning.functional.robust import krum_scores, squared_distances
from pfl_lightning.messages import ClientUpdate, FieldSchema
from pfl_lightning.robust.rules import Entry, Robust, Verdict, steps_of


class MultiKrum(Robust):
    """The updates with the lowest scores of Krum, unchanged, for any server (Blanchard et al., 2017).

    Distances are taken for each kind of content by itself (weights of the encoder, of the head, centroids, ...) in
    units of their median over the cohort's pairs, and added: no field drowns another. Those of single numbers have the
    square of their median size as unit, if that is larger.

    Args:
        byzantine: f, how many clients of a cohort of n may lie; n must be at least 2 f + 3.
        keep: How many updates are taken, m of the paper; ``None`` for n - f.
        tolerance: An update is left out only if its score is more than so many times the median of the scores; 0 leaves
            out all but ``keep``, as the paper does, also where nobody lies.
        colluding: Whether the f - 1 closest others do not count in a score: clients that lie together may send the
            same, which makes them close to one another.
        max_norm: See :class:`Robust`.
    """

    def __init__(
        self,
        byzantine: int,
        keep: int | None = None,
        tolerance: float = 0.0,
        colluding: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(max_norm)
        check_at_least("byzantine", byzantine, 0)
        check_at_least("keep", 1 if keep is None else keep, 1)
        check_number("tolerance", tolerance)
        self.byzantine, self.keep, self.tolerance, self.colluding = byzantine, keep, tolerance, colluding

    def least(self, refused: int) -> int:
        """2 f + 3 of those that may still lie; 1 where all have been found."""
        left = self.byzantine - refused
        return max(2 * left + 3 if left > 0 else 1, self.keep or 1)

    def judge(self, entries: Sequence[Entry], refused: int) -> Sequence[Verdict]:
        """Leave out what lies farthest from its closest others."""
        left = max(self.byzantine - refused, 0)
        keep = len(entries) - left if self.keep is None else self.keep
        if keep == len(entries) or len(entries) < 3:
            return [entry.update for entry in entries]
        scores = krum_scores(scaled_distances(entries), left, skip=max(left - 1, 0) if self.colluding else 0)
        limit = self.tolerance * float(scores.median())
        worst = {int(place) for place in scores.argsort(stable=True)[keep:] if float(scores[place]) > limit}
        return [
            f"{type(self).__name__} leaves its update out: its score is {float(scores[place]):.3g}, the cohort's "
            f"median is {float(scores.median()):.3g}"
            if place in worst
            else entry.update
            for place, entry in enumerate(entries)
        ]


class Krum(MultiKrum):
    """The one update with the lowest score (Blanchard et al., 2017).

    Args:
        byzantine: f, how many clients of a cohort may lie.
        max_norm: See :class:`Robust`.
    """

    def __init__(self, byzantine: int, max_norm: float | None = None) -> None:
        super().__init__(byzantine, keep=1, max_norm=max_norm)


# ---------------------------------------------------------------------- distances


def scaled_distances(entries: Sequence[Entry]) -> Tensor:
    """Squared distances between updates, (m, m): the sum over kinds of content, each in units of its median."""
    total = torch.zeros(len(entries), len(entries), dtype=torch.float64)
    others = ~torch.eye(len(entries), dtype=torch.bool)
    for found, least in (*_of_states(entries), *_of_statistics([entry.update for entry in entries])):
        own = found[others & (found > 0)]
        if len(own):
            unit = max(float(own.median()), least)
            # Two updates without a class in common are as far from each other as others are.
            total += found.nan_to_num(nan=unit) / unit * others
    return total


def _of_states(entries: Sequence[Entry]) -> Iterator[tuple[Tensor, float]]:
    """Distances between named tensors: steps from what was sent, by the first part of their names; and no unit."""
    steps = [steps_of(entry, sent_alone=False) for entry in entries]
    grams: dict[str, Tensor] = {}
    for name in steps[0]:
        group = ".".join(name.split(".")[:2]) + ("/running" if ".running_" in name else "")
        rows = torch.stack([step[name].flatten() for step in steps])
        grams[group] = grams.get(group, torch.zeros(())) + in_double(rows @ rows.T).cpu()
    return ((squared_distances(gram), 0.0) for gram in grams.values())


def _of_statistics(updates: Sequence[ClientUpdate]) -> Iterator[tuple[Tensor, float]]:
    """Distances between single tensors: means over the classes that both clients have, where rows are classes'.

    Integers and booleans say what a client has, and its number of samples bounds them: they are not compared. With the
    distances comes their least unit, the median size of single numbers: distances of these have no typical value, and
    an honest client's may be ten times the median.
    """
    for declared in fields(updates[0]):
        values = [getattr(update, declared.name) for update in updates]
        if not all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
            continue
        values = [value.detach().cpu().double() for value in values]
        schema = declared.metadata["schema"]
        classes = [_classes_of_rows(update, schema, value) for update, value in zip(updates, values, strict=True)]
        held = [own for own in classes if own is not None and len(own)]
        if len(held) == len(updates):
            points = values[0].new_zeros(max(int(own.max()) for own in held) + 1, len(updates), values[0][0].numel())
            for place, (own, value) in enumerate(zip(held, values, strict=True)):
                points[own, place] = value.reshape(len(own), -1)
            has = (points != 0).any(-1)  # a class that a client lacks has a row of zeros
        else:
            if len({value.shape for value in values}) > 1:  # rows that stand for nothing that two clients have
                values = [value.square().mean().sqrt() for value in values]
            points = torch.stack([value.flatten() for value in values])[None]
            has = torch.ones(1, len(updates), dtype=torch.bool)
        both = has[:, :, None] & has[:, None, :]
        least = float(points.square().median()) if schema.shape == "" else 0.0
        yield (squared_distances(points @ points.mT) * both).sum(0) / both.sum(0), least  # NaN where no class is common


def _classes_of_rows(update: ClientUpdate, schema: FieldSchema, value: Tensor) -> Tensor | None:
    """Classes that the rows of a tensor belong to; ``None`` where they belong to none."""
    first = (schema.shape or "").partition(" ")[0]
    if first == "C":
        return torch.arange(len(value))
    for declared in fields(update):
        by: FieldSchema | None = declared.metadata.get("schema")
        if by is not None and by.below == "C" and by.shape == first:
            found: Tensor = getattr(update, declared.name).cpu()
            return found
    return None
