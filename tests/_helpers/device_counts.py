"""What a GPU would wait for, counted on the pretended device: launches, synchronizations and copies, by line.

An operation is one launch; of a ``_foreach_`` call 50 tensors of a type are one. Views and allocations launch nothing.
What waits for a number (``item``, ``tolist``, ``nonzero``, ``equal``, a mask as an index) is a synchronization, what
goes from the host to the device or back is a copy, blocking or not.

What grows with the number of local epochs belongs to the steps, and the rest of a round is beside them: two runs that
differ in their epochs alone are counted, each in a round after the first ones, of which all is checked. Passes of the
encoder over a client's data, with what brings these to the device and the features back, are counted apart. What is
done once a round counts with one part for each client.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from _helpers import other_device
from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine, methods
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets, RandomCrop, RandomFlip

PACKAGE = str(Path(methods.__file__).parents[1])
KINDS = ("launches", "syncs", "h2d", "d2h")
AT_ONCE = 50
"""Tensors of a ``_foreach_`` call that one launch takes, if all are of one type; else it takes one each."""

JOINED = 128
"""Tensors that one launch of ``cat`` takes."""

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
VIEWS = ("alias", "as_strided", "chunk", "detach", "detach_", "diagonal", "expand", "imag", "lift_fresh", "narrow")
VIEWS += ("permute", "real", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose")
VIEWS += ("unbind", "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as_real", "_reshape_alias")
FREE = frozenset((*ALLOCATIONS, *VIEWS, "_unsafe_view", "is_pinned", "is_same_size"))
WAITING = frozenset(("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "tolist", "masked_select", "unique2"))
PASSES = frozenset((*(("fit/data.py", name) for name in ("features", "tensors", "loader")),))
PASSES |= {("methods/_class_means.py", "class_statistics")}
"""Functions that bring a client's data to the device, pass over them, and bring the features back."""

PASSED_ON = frozenset(("functional/tensor_lists.py",))
"""Files that work for their callers, to whose lines the counts belong."""

ROUNDS, COUNTED = 3, 2
ENGINES = {
    "sequential": SequentialEngine,
    "vectorized": lambda: VectorizedEngine(forward="vmap"),
    "trainer": TrainerEngine,
}
Counts = Counter[tuple[str, str, str]]
"""Numbers by (part: "pass" or "rest", line of the package, kind)."""


@dataclass(frozen=True)
class Case:
    """A federation of a few clients with random images.

    Attributes:
        engine: One of :data:`ENGINES`.
        method: Name of the method.
        encoder: Name of the encoder.
        augmented: Whether batches are cropped and flipped.
        sizes: Training samples of each client.
        batch_size: Samples in a batch.
        side: Height and width of an image.
    """

    engine: str
    method: str
    encoder: str
    augmented: bool = False
    sizes: tuple[int, ...] = (16, 16, 16, 16)
    batch_size: int = 8
    side: int = 16


@dataclass
class Found:
    """Counts of a case.

    Attributes:
        beside: For each client and round, beside steps and passes, by kind.
        passes: The same of passes over the data.
        step: For each training step, by kind; of stacked clients, for each step of the one with most.
        lines: For each client and round, beside steps and passes, by (line, kind).
        step_lines: For each step, by (line, kind).
    """

    beside: dict[str, float]
    passes: dict[str, float]
    step: dict[str, float]
    lines: dict[tuple[str, str], float] = field(repr=False)
    step_lines: dict[tuple[str, str], float] = field(repr=False)


class Watch(L.Callback):
    """Counts in one round of a run, from its start to its end."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.active = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.active = trainer.current_epoch == COUNTED

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.active = False

    def __call__(self, operation: str, args: Any, result: Any) -> None:
        if not self.active:
            return
        kind, number = cost(operation, args, result)
        if number:
            self.counts[(*place(), kind)] += number


def cost(operation: str, args: Any, result: Any) -> tuple[str, int]:
    """Kind and number of what an operation costs a GPU."""
    name = operation.removeprefix("aten.").partition(".")[0]
    if name in ("_to_copy", "copy_"):
        places = [is_there(args[1] if name == "copy_" else args[0]), is_there(result)]
        return {(False, True): "h2d", (True, False): "d2h"}.get(tuple(places), "launches"), 1
    masks = [one for one in args[1] or () if one is not None and one.dtype == torch.bool] if name == "index" else ()
    if name in WAITING or masks:
        return "syncs", 1
    if name in FREE:
        return "launches", 0
    if name.startswith("_foreach_"):
        types = {one.dtype for value in args if isinstance(value, list | tuple) for one in value}
        many = len(args[0])
        return "launches", many if len(types) > 1 else math.ceil(many / AT_ONCE)
    return "launches", math.ceil(len(args[0]) / JOINED) if name in ("cat", "stack") else 1


def is_there(tensor: Any) -> bool:
    """Whether a tensor is on the device."""
    return isinstance(tensor, other_device.DeviceTensor)


def place() -> tuple[str, str]:
    """Whether it is a pass over data, and the innermost line of the package; autograd's threads have none."""
    frame, line, part = sys._getframe(2), None, "rest"
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            own = path[len(PACKAGE) + 1 :]
            if own not in PASSED_ON:
                line = line or f"{own}:{frame.f_lineno} {frame.f_code.co_name}"
            if (own, frame.f_code.co_name) in PASSES:
                part = "pass"
        frame = frame.f_back
    return part, line or "elsewhere"


def counted(case: Case, epochs: int) -> Counts:
    """Counts of a round with this number of local epochs."""
    generator = torch.Generator().manual_seed(0)
    total = sum(case.sizes)
    images = torch.rand(total, 3, case.side, case.side, generator=generator)
    dataset = TensorDataset(images, torch.arange(total) % 5)
    augment = [RandomCrop(padding=1), RandomFlip()] if case.augmented else []
    partition = IID(len(case.sizes), list(case.sizes))
    options = {"batch_size": case.batch_size, "validation_share": 0.0, "augment": augment}
    data = FromDatasets(train=dataset, test=dataset, partition=partition, **options)
    method = getattr(methods, case.method)
    more = {"head_epochs": epochs} if case.method == "FedPAC" else {}
    make = partial(method, lr=0.01, momentum=0.5, epochs=epochs, **more)
    federation = Federation(make, encoder=case.encoder, engine=ENGINES[case.engine]())
    watch = Watch()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        accelerator=other_device.NAME,
        inference_mode=False,
        limit_val_batches=0,
        callbacks=[FederatedLoop(), watch],
        **quiet,
    )
    other_device.watchers.append(watch)
    try:
        with other_device.OtherDevice():
            trainer.fit(federation, datamodule=data)
    finally:
        other_device.watchers.remove(watch)
    left_out = trainer.callback_metrics["train/clients_left_out"]
    assert left_out == 0, f"{left_out} clients were left out, so that other lines have run"
    return watch.counts


def count(case: Case) -> Found:
    """Count a case; the device must be installed."""
    one, two = counted(case, 1), counted(case, 2)
    clients = len(case.sizes)
    per_epoch = [math.ceil(size / case.batch_size) for size in case.sizes]
    phases = 2 if case.method == "FedPAC" else 1
    steps = phases * (max(per_epoch) if case.engine == "vectorized" else sum(per_epoch))
    grown = {key: two[key] - one[key] for key in one.keys() | two.keys()}
    lines, passes, step_lines = Counter[Any](), Counter[Any](), Counter[Any]()
    for (part, line, kind), number in grown.items():
        step_lines[line, kind] += number / steps
        # A first step may launch less, such as one without a momentum.
        (passes if part == "pass" else lines)[line, kind] += max(0.0, one[part, line, kind] - number) / clients
    return Found(*(by_kind(each) for each in (lines, passes, step_lines)), lines, step_lines)


def by_kind(lines: Counter[Any]) -> dict[str, float]:
    """Sums by kind."""
    return {kind: round(sum(n for (_, own), n in lines.items() if own == kind), 2) for kind in KINDS}


def main() -> None:
    """python -m _helpers.device_counts CASE...: the cases, as JSON, counted; the last line is a JSON list."""
    warnings.simplefilter("ignore")
    other_device.install()
    found = [count(Case(**json.loads(text))) for text in sys.argv[1:]]
    print(json.dumps([{"beside": one.beside, "passes": one.passes, "step": one.step} for one in found]))


if __name__ == "__main__":
    main()
