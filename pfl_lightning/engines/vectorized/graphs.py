"""Steps of a stack captured as a CUDA graph of forward and backward pass, and replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.vectorized.limits import uses_batch_index
from pfl_lightning.engines.vectorized.step import Computation, EagerComputation, StepInputs, StepOutputs
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.seeding import GeneratorStates

WARM_UP = 3
"""Steps on a side stream before the capture, as torch's documentation asks; they are ordinary steps of the fit."""


class CudaGraph:
    """Captures work on a device and repeats it, after torch's pattern for the capture of a whole network."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._graph, self._side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def warm_up(self, work: Callable[[], StepOutputs]) -> StepOutputs:
        """Do the work on a side stream, before it is recorded."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            outputs = work()
        current.wait_stream(self._side)
        return outputs

    def capture(self, work: Callable[[], StepOutputs]) -> StepOutputs:
        """Record the work without doing it; the outputs hold nothing before the first replay."""
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph):
            return work()

    def replay(self) -> None:
        """Repeat the recorded work, on the same tensors."""
        self._graph.replay()


class GraphedComputation:
    """Computation that captures another one for all clients and a whole batch, and replays it.

    The parameters and buffers of the stack stay where they are during a phase: the optimizer changes them in place, and
    the graph reads and changes them there. The batch is copied into memory of the graph. Other batches
    (of some of the clients, or of another size) and those of fewer clients are computed as before, until the shapes
    return; so is everything where a step draws random numbers: their streams under replay are not those that seeds
    give elsewhere. A step that cannot be captured ends the run: torch leaves the stream and the generator of a failed
    capture in use, and what is computed then is not to be trusted.

    The outputs are overwritten by the next replay: gradients must be used before the next step.

    Args:
        compute: The computation to capture.
        recorder: Factory of recorders.
        log: Logs a line once.
    """

    def __init__(
        self, compute: Computation, recorder: Callable[[torch.device], CudaGraph], log: Callable[[str], None]
    ) -> None:
        self._compute, self._new_recorder, self._log = compute, recorder, log
        self._stack: tuple[Any, ...] = ()
        self._batch: tuple[Any, ...] = ()
        self._recorder: CudaGraph | None = None
        self._captured: tuple[StepInputs, StepOutputs] | None = None  # the batch is the graph's memory, to be filled
        self._warmed_up = 0
        self._refused = False

    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """Losses and gradients of the batch with this number in its epoch; buffers may change in place."""
        if self._refused or not inputs.in_place or inputs.mask is not None:
            return self._compute(inputs, index)
        tensors = (*inputs.trained.values(), *inputs.others.values())
        stack = (len(inputs.batch[0]), *(tensor.data_ptr() for tensor in tensors))
        batch = tuple((part.shape, part.dtype) for part in inputs.batch)
        if self._recorder is None or stack != self._stack:
            self._captured, self._recorder = None, None  # whose memory is free before there is a new graph
            self._stack, self._batch, self._warmed_up = stack, batch, 0
            self._recorder = self._new_recorder(inputs.batch[0].device)
        if batch != self._batch:
            return self._compute(inputs, index)
        if self._warmed_up < WARM_UP:
            return self._warm_up(self._recorder, inputs, index)
        if self._captured is None:
            self._captured = self._capture(self._recorder, inputs, index)
        own, outputs = self._captured
        for part, filled in zip(inputs.batch, own.batch, strict=True):
            filled.copy_(part, non_blocking=True)
        self._recorder.replay()
        return outputs

    def _warm_up(self, recorder: CudaGraph, inputs: StepInputs, index: int) -> StepOutputs:
        device = inputs.batch[0].device
        before = GeneratorStates.read(device)
        outputs = recorder.warm_up(lambda: self._compute(inputs, index))
        if not GeneratorStates.read(device).is_as(before):
            self._refused = True
            self._log("training_step draws random numbers (as in dropout); its steps run without CUDA graphs")
        self._warmed_up += 1
        return outputs

    def _capture(self, recorder: CudaGraph, inputs: StepInputs, index: int) -> tuple[StepInputs, StepOutputs]:
        own = replace(inputs, batch=tuple(part.clone() for part in inputs.batch))
        try:
            return own, recorder.capture(lambda: self._compute(own, index))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            advice = "leave cuda_graphs out, or use no .item(), .cpu() or torch.tensor(...) in training_step"
            raise ConfigurationError(f"a step could not be captured as a CUDA graph ({reason}): {advice}") from error


def make_computation(
    client: FederatedClient, environment: FitEnvironment, cuda_graphs: bool, log: Callable[[str], None]
) -> Computation:
    """Computation of the steps of a phase, for the module in that phase.

    Args:
        client: The module.
        environment: Settings of the outer Trainer.
        cuda_graphs: Whether steps are captured where they can be.
        log: Logs a line once.
    """
    computation, recorder = EagerComputation(client, environment), recorder_for(environment.device)
    if cuda_graphs and recorder is None:
        log(f"cuda_graphs needs a CUDA device and has no effect on {environment.device.type!r}")
    elif cuda_graphs and uses_batch_index(client):
        log(f"{type(client).__name__}.training_step uses batch_idx; its steps are not captured")
    elif cuda_graphs and recorder is not None:
        return GraphedComputation(computation, recorder, log)
    return computation


def recorder_for(device: torch.device) -> Callable[[torch.device], CudaGraph] | None:
    """Class that records work on a device; ``None`` if there is none."""
    return CudaGraph if device.type == "cuda" else None
