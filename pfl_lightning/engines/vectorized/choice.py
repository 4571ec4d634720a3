"""Which way of a step is faster on a device: many clients at once, or one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from pfl_lightning.engines.vectorized.step import Computation, StepInputs, parts_of
from pfl_lightning.seeding import GeneratorStates

WARM_UP, TIMED = 2, 3
"""Steps before the clock is read, and between its readings."""

Clock = Callable[[], float]


def seconds_of_step(
    compute: Computation, inputs: StepInputs, index: int, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """Time a step's forward and backward pass in both ways; states and generators are left as they were.

    Args:
        compute: Computes the step.
        inputs: Its tensors, of all clients.
        index: Number of the batch.
        clock: Gives seconds.

    Returns:
        Seconds of a step of all clients at once, and of one of each of them after the other.
    """
    device, found = inputs.batch[0].device, list[float]()
    before = GeneratorStates.read(device)
    for rows in (slice(None), slice(1)):  # all clients at once, and the first alone, without the stack's own buffers
        trained, others, batch = parts_of(inputs, rows)
        others = {name: tensor.clone() for name, tensor in others.items()}
        given = replace(inputs, trained=trained, others=others, batch=batch, in_place=False, apart=rows.stop == 1)
        found.append(min(_times(compute, given, index, clock)))
    before.restore(device)
    return found[0], found[1] * len(inputs.batch[0])


def _times(compute: Computation, inputs: StepInputs, index: int, clock: Clock) -> Iterator[float]:
    for number in range(WARM_UP + TIMED):
        start = clock()
        float(compute(inputs, index).terms["loss"].sum())  # waits for the device, of whatever kind
        if number >= WARM_UP:
            yield clock() - start
