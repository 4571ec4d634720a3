"""Updates that lie far from all others: of each, nothing but norms is kept to compare the next with."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.checks import check_number
from pfl_lightning.functional.tensor_lists import HOST, float64_device, moved
from pfl_lightning.messages import LARGEST, STATISTICS, Message, magnitude

Norms = Mapping[str, float]
"""Distances of the tensors of an update from those of its broadcast, by name; norms of those without counterpart."""

ENOUGH = 3
"""Updates whose median one of them cannot move at will."""


class UpdateGuard:
    """Compares updates with the median of those of the round so far and of the last accepted round.

    The distance of each floating-point tensor from the one of this name in the broadcast counts, or its norm where the
    broadcast has none. Of an even number of updates the lower median is taken. A median of zero says nothing.

    However many times the median it is, a distance up to the norm of all that was sent is none of an update that lies:
    where training has converged, a client that has not moves a thousand times as far. The same holds of statistics
    whose numbers are at most ``max_ratio``, which need not be of one scale: those of a class that few clients have.

    Args:
        max_ratio: Multiple of the median beyond which an update is left out; ``None`` compares nothing.
    """

    def __init__(self, max_ratio: float | None = 1000.0) -> None:
        check_number("max_update_ratio", max_ratio, least=1.0, optional=True)
        self.max_ratio = max_ratio
        self._last: dict[str, list[float]] = {}  # of the last accepted round that had this tensor
        self._round: dict[str, list[float]] = {}
        self._sorted: dict[str, list[float]] = {}  # both

    @torch.no_grad()
    def norms(self, update: Message, sent: Message) -> tuple[Norms, bool]:
        """Measure an update that the server has checked, and let it count in the medians.

        Each of its tensors is read once more.

        Args:
            update: The update.
            sent: The broadcast that it answers.

        Returns:
            Its norms, and whether it can be judged: enough of each of its tensors are known, its own included.
        """
        if self.max_ratio is None:
            return {}, True
        before = {name: tensor for name, _, tensor in sent.tensors()}
        found = dict[str, Tensor]()
        for name, _, tensor in update.tensors():
            if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
                # With sums of squares that are finite, and a type that can be subtracted.
                found[name] = tensor if tensor.dtype == torch.float64 or tensor.is_complex() else tensor.float()
        names = [name for name, own in found.items() if name in before and before[name].shape == own.shape]
        # On a GPU if any of them is there, unless it has no double precision; what is elsewhere is sent by one copy.
        device = next((one for own in found.values() if (one := float64_device(own.device)) != HOST), HOST)
        near = moved([*found.values(), *(before[name] for name in names)], device)
        found, olds = dict(zip(found, near, strict=False)), near[len(found) :]
        if names:
            alike = [old.to(found[name].dtype) for name, old in zip(names, olds, strict=True)]
            found.update(zip(names, torch._foreach_sub([found[name] for name in names], alike), strict=True))
        own_norms = torch._foreach_norm(list(found.values())) if found else []
        values = torch.stack([norm.float() for norm in own_norms]).tolist() if found else []
        # A mask of -3e38 that comes back a little different is infinitely far.
        norms = {name: value for name, value in zip(found, values, strict=True) if math.isfinite(value)}
        for name, norm in norms.items():
            insort(self._sorted.setdefault(name, []), norm)
            self._round.setdefault(name, []).append(norm)
        return norms, all(len(self._sorted[name]) >= ENOUGH for name in norms)

    def remove(self, norms: Norms) -> None:
        """Let an update that is left out count no more."""
        for name, norm in norms.items():
            self._sorted[name].remove(norm)
            self._round[name].remove(norm)

    def check(self, update: Message, sent: Message, norms: Norms) -> None:
        """Refuse an update that was measured and lies too far from the others.

        Raises:
            InvalidMessageError: Names the client, the round, and the tensor.
        """
        ratio = self.max_ratio
        for name, norm in norms.items():
            known = self._sorted[name]
            median = known[(len(known) - 1) // 2]
            if ratio is None or not norm > ratio * median > 0 or _is_sound(update, sent, name, norm, ratio):
                continue
            shape, old = ({n: t.shape for n, _, t in one.tensors()}.get(name) for one in (update, sent))
            what = "the change of {} has a norm" if shape == old else "{} has a norm"
            update.refuse(
                f"{what.format(name)} of {norm:.3g}, more than {ratio:g} times the median of the updates, "
                f"{median:.3g}: look at this client's data, lower the learning rate or clip the gradient. "
                "FederatedLoop(max_update_ratio=None) accepts such updates"
            )

    def end_round(self, accepted: bool) -> None:
        """Keep the norms of a round that was aggregated, and forget those of one that was not."""
        if accepted:
            self._last |= self._round
        self._round, self._sorted = {}, {name: sorted(values) for name, values in self._last.items()}

    def state_dict(self) -> dict[str, Any]:
        """Norms of the last accepted round, for the checkpoint."""
        return {name: list(values) for name, values in self._last.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._last = {name: list(values) for name, values in state.items()}
        self._round = {}
        self.end_round(accepted=False)


def _is_sound(update: Message, sent: Message, name: str, norm: float, ratio: float) -> bool:
    """Whether a tensor far beyond the median is none that could harm."""
    kinds = {own: (kind, tensor) for own, kind, tensor in update.tensors()}
    kind, tensor = kinds[name]
    if kind == STATISTICS and magnitude(tensor) <= ratio:
        return True
    given = {own: one for own, _, one in sent.tensors() if one.is_floating_point() or one.is_complex()}
    if name in given and magnitude(given[name]) > LARGEST:  # a mask
        return True
    usual = [one.detach() if one.is_complex() else one.detach().double() for one in given.values()]
    return norm <= math.hypot(*(torch.linalg.vector_norm(one).item() for one in usual if magnitude(one) <= LARGEST))
