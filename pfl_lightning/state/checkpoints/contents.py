"""What a checkpoint must hold: names and shapes that it carries itself, so that a missing part is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["CONTENTS", "content_fault", "describe_contents", "saved_bytes"]

CONTENTS = "pfl_lightning_contents"
"""Key of the description in a checkpoint."""

EXTRA = {"encoders", "fixed", "method", "partition", "personal", "round", "seed"}
"""What a federation saves beside tensors, since the first version."""

NESTED = (Tensor, Mapping, list, tuple)


def describe_contents(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Every name in a checkpoint, with the type and shape of what it stands for.

    Below ``state_dict`` every name counts, of the other parts the keys, and of ``callbacks`` theirs: Lightning may
    bring the rest into another form when it loads a checkpoint of an earlier version.

    Args:
        checkpoint: The content of a checkpoint.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.checkpoints.contents import describe_contents
        >>> describe_contents({"epoch": 1, "state_dict": {"head": torch.zeros(2, 3), "rounds": [1, 2]}})
        {'epoch': '', 'state_dict/head': 'torch.float32 (2, 3)', 'state_dict/rounds': 'list of 2'}
    """
    found = {key: "" for key in checkpoint if key not in ("state_dict", "callbacks", CONTENTS)}
    found |= dict(_names(checkpoint.get("state_dict"), "state_dict"))
    for name, state in checkpoint.get("callbacks", {}).items():
        found |= {f"callbacks/{name}/{key}": "" for key in state} if isinstance(state, Mapping) else {}
    return found


def content_fault(checkpoint: Mapping[str, Any]) -> str | None:
    """What a federation's checkpoint lacks by its own description; ``None`` for nothing, or without a description."""
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping) or not isinstance(state.get("_extra_state"), Mapping):
        return "is not of a Federation: it has no clients' states"
    missing = sorted(EXTRA - state["_extra_state"].keys())
    if missing:
        return f"is incomplete: state_dict/_extra_state/{missing[0]} is missing"
    expected = checkpoint.get(CONTENTS)
    if expected is None:
        return None
    if not isinstance(expected, Mapping):
        return f"is damaged: its {CONTENTS} is a {type(expected).__name__}"
    found = describe_contents(checkpoint)
    for name, what in expected.items():
        if name not in found:
            return f"is incomplete: {name} is missing"
        if found[name] != what:
            return f"is damaged: {name} is {found[name]}, expected {what}"
    return None


def _names(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Names of tensors and of plain values with names of their own; of a list of numbers the length alone."""
    if isinstance(value, Tensor):
        yield name, f"{value.dtype} {tuple(value.shape)}"
    elif isinstance(value, Mapping):
        if not value:
            yield name, "empty"
        for key, item in value.items():
            if isinstance(key, str) or isinstance(item, NESTED):
                yield from _names(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        yield name, f"list of {len(value)}"
        for place, item in enumerate(value):
            if isinstance(item, NESTED):
                yield from _names(item, f"{name}/{place}")
    else:
        yield name, type(value).__name__


def saved_bytes(value: Any) -> int:
    """Bytes of all tensors in a checkpoint, each memory counted once: it takes at least this much space."""
    sizes: dict[int, int] = {}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor) and part.layout == torch.strided:
            sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return sum(sizes.values())
