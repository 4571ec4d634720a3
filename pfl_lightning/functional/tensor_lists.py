"""Many tensors handled at once, and their averages: one copy between host and device, one wait, few launches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

__all__ = ["RunningAverage", "copied", "flat", "float64_device", "magnitudes", "memory_order", "moved", "server_step"]
__all__ += ["shaped", "unusual_kind", "weighted_average", "write"]

HOST = torch.device("cpu")

SINGLE_DEVICES = {"mps"}
"""Types of devices that have no double precision."""

_FLOATS, _WHOLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16), (torch.int64, torch.int32, torch.int16)
COMPARED = frozenset((*_FLOATS, *_WHOLE, torch.int8, torch.uint8, torch.bool))
"""Types for which torch finds the extremes; others are converted."""


def float64_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU where `device` has no double precision (Apple's MPS)."""
    return torch.device("cpu") if device.type in SINGLE_DEVICES else device


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device: those that are there already as they are, the others sent together.

    Dense tensors of one device are packed into one buffer, pinned on the host of a CUDA device, which is sent by a
    single copy; what arrives are views of its memory.

    Args:
        tensors: Tensors of any devices and types.
        device: Where they are to be; one without a number is any of its type.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import moved
        >>> tensors = [torch.ones(2), torch.tensor(True)]
        >>> moved(tensors, torch.device("cpu"))[1] is tensors[1]
        True
    """
    found = list(tensors)
    kind, number = device.type, device.index
    away = [n for n, one in enumerate(found) if one.device.type != kind or number not in (None, one.device.index)]
    if len(away) < 2 or not all(
        unusual_kind(found[n]) is None and found[n].device == found[away[0]].device for n in away
    ):
        for n in away:
            found[n] = found[n].to(device)
        return found
    away.sort(key=lambda n: -found[n].element_size())  # so that every tensor begins at a multiple of its numbers' size
    parts = [flat(found[n].detach().resolve_conj().resolve_neg()).view(torch.uint8) for n in away]
    size, source = sum(map(len, parts)), parts[0].device
    packed, arrived = (
        torch.empty(size, dtype=torch.uint8, device=one, pin_memory=(one.type, other.type) == ("cpu", "cuda"))
        for one, other in ((source, device), (device, source))
    )
    arrived.copy_(torch.cat(parts, out=packed), non_blocking=device.type == "cuda")
    for n, part in zip(away, arrived.split(list(map(len, parts))), strict=True):
        found[n] = shaped(part.view(found[n].dtype), found[n].shape, memory_order(found[n]))
    return found


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions of a tensor, the one first in which neighbors lie farthest apart in memory."""
    return tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))


def flat(tensor: Tensor) -> Tensor:
    """Numbers of a tensor as they lie in memory, (n,): a view, unless there are gaps between them.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import flat
        >>> flat(torch.tensor([[1, 2], [3, 4]]).T)
        tensor([1, 2, 3, 4])
    """
    return tensor.permute(memory_order(tensor)).reshape(-1)


def shaped(numbers: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """The tensor of a shape that :func:`flat` gave these numbers for; a view.

    Args:
        numbers: The numbers, (n,).
        shape: The shape.
        order: Its :func:`memory_order`.
    """
    return numbers.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])


def unusual_kind(tensor: Tensor) -> str | None:
    """What kind of tensor it is, if not a dense one with numbers.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import unusual_kind
        >>> unusual_kind(torch.eye(2)), unusual_kind(torch.eye(2).to_sparse())
        (None, 'torch.sparse_coo')
    """
    if tensor.is_meta or tensor.is_quantized:
        return "meta" if tensor.is_meta else "quantized"
    return str(tensor.layout) if tensor.layout != torch.strided or tensor.is_nested else None


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of detached tensors.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import copied
        >>> copied([torch.ones(2)])
        [tensor([1., 1.])]
    """
    plain = [one.detach().resolve_conj().resolve_neg() for one in tensors]
    together = [one.device.type != "cpu" and unusual_kind(one) is None for one in plain]
    fresh = [torch.empty_like(one) if own else one.clone() for one, own in zip(plain, together, strict=True)]
    write(list(compress(fresh, together)), list(compress(plain, together)))
    return fresh


def write(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors of the same shapes, in place.

    Values that are not where the first of the tensors is are sent there by one copy. A GPU copies many tensors by few
    launches where they are of one type.

    Args:
        into: The tensors, which must not need gradients.
        values: What they are to hold.
    """
    groups = dict[object, tuple[list[Tensor], list[Tensor]]]()
    for own, value in zip(into, moved(values, into[0].device) if into else (), strict=True):
        owns, others = groups.setdefault((own.device, own.dtype, value.dtype), ([], []))
        owns.append(own)
        others.append(value)
    for owns, others in groups.values():
        torch._foreach_copy_(owns, others)


def magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Largest absolute value of each dense tensor; NaN if there is one, and 0 without any number.

    All are read before the one wait for a device.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import magnitudes
        >>> magnitudes([torch.tensor([1.0, -3.0]), torch.tensor([float("nan"), 1.0]), torch.ones(0), torch.tensor(-7)])
        [3.0, nan, 0.0, 7.0]
    """
    found, waiting = [0.0] * len(tensors), dict[torch.dtype, list[tuple[int, Tensor]]]()
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
            if real.dtype not in COMPARED or float64_device(real.device) != real.device:  # such as float8
                real = real.cpu().double()
            if real.device.type == "cpu":
                smallest, largest = torch.stack(real.aminmax()).tolist()  # one pass
                found[place] = float(max(largest, -smallest))
            else:
                waiting.setdefault(real.dtype, []).append((place, real))
    whole = [waiting.pop(dtype) for dtype in list(waiting) if not dtype.is_floating_point]
    if whole:  # torch has no such norm of integers
        numbers, values = zip(*(one for group in whole for one in group), strict=True)
        parts = torch.cat([flat(value) for value in values]).float().split([value.numel() for value in values])
        waiting.setdefault(torch.float32, []).extend(zip(numbers, parts, strict=True))
    norms = [norm for group in waiting.values() for norm in torch._foreach_norm([real for _, real in group], math.inf)]
    places = [place for group in waiting.values() for place, _ in group]
    for place, size in zip(places, torch.stack(norms).tolist() if norms else (), strict=True):
        found[place] = size
    return found


class RunningAverage:
    """Weighted average of states that arrive one after another.

    It holds one double-precision accumulator of the size of a state, however many states arrive. The same states and
    weights in the same order give the result of `weighted_average`, bit for bit.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import RunningAverage
        >>> average = RunningAverage()
        >>> average.update({"w": torch.tensor([1.0])}, weight=1)
        >>> average.update({"w": torch.tensor([4.0])}, weight=2)
        >>> average.result()  # (1 * 1 + 2 * 4) / 3
        {'w': tensor([3.])}
        >>> average.total_weight
        3.0
    """

    def __init__(self) -> None:
        # Names of a sum: on a GPU all of a type lie one after another, so that few launches add them.
        self._sums: list[tuple[tuple[str, ...], Tensor]] = []
        self._template: dict[str, tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]] = {}
        self.total_weight = 0.0
        """Sum of the weights so far."""
        self._num_states = 0

    @torch.no_grad()
    def update(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Add one state.

        Args:
            state: named tensors. The first state fixes names, shapes, and the dtypes and devices of the result.
            weight: its weight, finite and not negative. A state of weight zero is checked and then ignored, so that
                whatever it holds (NaN included) does not reach the result.

        Raises:
            ValueError: if the weight is negative or not finite, or names or shapes differ from the first state's.
                The average is unchanged then.
        """
        weight = float(weight)
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"expected a finite weight >= 0 for state {self._num_states}, got {weight}: leave the state out instead"
            )
        if self._num_states == 0:
            groups: dict[tuple[torch.device, torch.dtype, str], list[str]] = {}
            for name, tensor in state.items():
                on_host = float64_device(tensor.device).type == "cpu"
                order = () if on_host else memory_order(tensor)
                self._template[name] = tensor.shape, tensor.dtype, tensor.device, order
                groups.setdefault((tensor.device, tensor.dtype, name if on_host else ""), []).append(name)
            for (device, kind, _), alike in groups.items():
                dtype = torch.complex128 if kind.is_complex else torch.float64
                size = sum(state[name].numel() for name in alike)
                self._sums.append((tuple(alike), torch.zeros(size, dtype=dtype, device=float64_device(device))))
        elif state.keys() != self._template.keys():
            raise ValueError(
                f"state {self._num_states} does not have the names of state 0: missing "
                f"{sorted(self._template.keys() - state.keys())}, unexpected "
                f"{sorted(state.keys() - self._template.keys())}; average only states of the same architecture"
            )
        for name, (shape, *_) in self._template.items():
            if state[name].shape != shape:
                raise ValueError(
                    f"state {self._num_states} has {name!r} of shape {tuple(state[name].shape)}, state 0 has "
                    f"{tuple(shape)}: average only states of the same architecture"
                )
        if weight > 0:
            for names, total in self._sums:
                own = moved([state[name] for name in names], total.device)
                # add_ promotes inside the kernel: the product and the sum are double, no double copy is made
                orders = [self._template[name][3] for name in names]
                rows = [(t.permute(order) if order else t).reshape(-1) for t, order in zip(own, orders, strict=True)]
                total.add_(rows[0] if len(rows) == 1 else torch.cat(rows), alpha=weight)
        self.total_weight += weight
        self._num_states += 1

    @torch.no_grad()
    def result(self) -> dict[str, Tensor]:
        """Return the average so far, in the dtypes and on the devices of the first state.

        Returns:
            Named tensors that share no memory with the accumulator. Integer and boolean tensors (such as the
            `num_batches_tracked` of batch normalization) hold the average rounded to the nearest integer, halves to
            the even one.

        Raises:
            ValueError: if no state of positive weight has arrived.
        """
        if not self.total_weight > 0:
            raise ValueError(
                f"an average needs a positive total weight, got {self.total_weight} from {self._num_states} states: "
                "give at least one state a positive weight"
            )
        average = dict[str, Tensor]()
        for names, total in self._sums:
            _, dtype, device, _ = self._template[names[0]]
            mean = total / self.total_weight
            if not (dtype.is_floating_point or dtype.is_complex):
                mean = mean.round_()
            forms = [(self._template[name][0], self._template[name][3]) for name in names]
            parts = mean.to(dtype=dtype, device=device).split([shape.numel() for shape, _ in forms])
            places = zip(parts, forms, strict=True)
            own = [shaped(part, shape, order) if order else part.view(shape) for part, (shape, order) in places]
            # In memory of their own, as one of them may outlast the others.
            average.update(zip(names, own if len(own) == 1 else copied(own), strict=True))
        return {name: average[name] for name in self._template}


def weighted_average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | Tensor) -> dict[str, Tensor]:
    """Weighted average of named tensors, sum_k w_k state_k / sum_k w_k (FedAvg; FedPAC, eq. 18).

    Args:
        states: K >= 1 mappings from name to tensor with the same names and shapes.
        weights: K nonnegative, finite numbers of positive sum, for instance sample counts; need not sum to one.

    Returns:
        New tensors in the dtypes and on the devices of the first state. Sums run in double precision. Integer and
        boolean tensors hold the average rounded to the nearest integer, halves to the even one. A state of weight
        zero does not reach the result, even where it holds NaN.

    Raises:
        ValueError: if there are no states, not as many weights as states, a bad weight, or names or shapes differ.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import weighted_average
        >>> states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}, {"w": torch.tensor([float("nan")])}]
        >>> weighted_average(states, weights=[10, 20, 0])  # a state of weight zero is ignored
        {'w': tensor([3.])}
    """
    values = weights.tolist() if isinstance(weights, Tensor) else list(weights)
    if not isinstance(values, list):
        raise ValueError("expected one weight per state as a vector, got a tensor without dimensions: use shape (K,)")
    if len(states) == 0:
        raise ValueError("expected at least one state to average, got none: is the cohort empty?")
    if len(values) != len(states):
        raise ValueError(f"expected one weight per state, got {len(values)} weights for {len(states)} states")
    average = RunningAverage()
    for state, weight in zip(states, values, strict=True):
        average.update(state, weight)
    return average.result()


@torch.no_grad()
def server_step(
    before: Mapping[str, Tensor], mean: Mapping[str, Tensor], step: float, parameters: Collection[str]
) -> dict[str, Tensor]:
    """State from which the server goes a step towards the clients' mean, x + s (mean - x).

    This is eta_g of SCAFFOLD and beta of pFedMe. Running statistics of batch normalization go with the parameters, at
    most up to the mean: a variance beyond it could be negative. Counters are those of the mean.

    Args:
        before: x, named tensors.
        mean: Mean of the clients' states, of the same names.
        step: s; 1 gives the mean, 0 leaves everything but counters as it is, more than 1 goes beyond the mean.
        parameters: Names that go beyond the mean where s is larger than 1; the others are buffers.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import server_step
        >>> server_step({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 1.5, parameters=["w"])
        {'w': tensor([4.])}
    """
    stepped = dict(mean)
    for name, target in mean.items():
        if target.is_floating_point() or target.is_complex():
            own = step if name in parameters else min(step, 1.0)
            stepped[name] = torch.lerp(before[name].to(target.device), target, own)
    return stepped
