"""Steps as graphs of forward and backward pass: compiled, or captured as a CUDA graph and replayed by one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.vectorized.groups import PerModule
from pfl_lightning.engines.vectorized.limits import equal_attributes, python_state, uses_batch_index
from pfl_lightning.engines.vectorized.step import Computation, EagerComputation, StepInputs, StepOutputs
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.seeding import GeneratorStates

USES = 10
"""Steps of a shape before it is compiled: compilation pays off after many of them."""
MAX_GRAPHS = 8
"""Largest number of graphs of one phase; further shapes are not compiled."""

HOST = torch.device("cpu")

Key = tuple[Any, ...]
Graph = Callable[[list[Tensor]], StepOutputs]


@dataclass
class CompiledSteps:
    """Graphs of one phase of a module, kept for all rounds.

    Attributes:
        attributes: The module's Python attributes, which the graphs hold as constants.
        uses: Number of steps of each shape.
        graphs: Graphs by shape.
        refused: Whether compiling has been given up.
    """

    attributes: dict[str, Any]
    uses: Counter[Key] = field(default_factory=Counter)
    graphs: dict[Key, Graph] = field(default_factory=dict)
    refused: bool = False


class CompiledComputation:
    """Computation that compiles another one, for frequent shapes.

    The forward and the backward pass are recorded together by executing them once (``make_fx``), after ``vmap``,
    autograd and autocast have done their part; what is compiled is a graph of plain tensor operations. (Given the
    module's code instead, ``torch.compile`` loses the gradients where ``functional_call`` meets ``vmap``.) Shapes are
    fixed: the whole stack with whole batches is worth a graph, and few others are.

    Args:
        compute: The computation to compile.
        steps: The graphs so far.
        log: Logs a line once.
    """

    def __init__(self, compute: Computation, steps: CompiledSteps, log: Callable[[str], None]) -> None:
        self._compute, self._steps, self._log = compute, steps, log
        self._clients: Key | None = None

    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """See :class:`~pfl_lightning.engines.vectorized.step.Computation`."""
        steps, key = self._steps, self._key(inputs)
        if not self.settled(inputs):
            steps.uses[key] += 1
            if steps.uses[key] >= USES:
                self._build(key, inputs, index)
        return steps.graphs[key](inputs.tensors()) if key in steps.graphs else self._compute(inputs, index)

    def settled(self, inputs: StepInputs) -> bool:
        """Whether there is a graph, or will be none."""
        steps = self._steps
        return steps.refused or len(steps.graphs) >= MAX_GRAPHS or self._key(inputs) in steps.graphs

    def _key(self, inputs: StepInputs) -> Key:
        if self._clients is None:  # what is equal for any number of clients
            tensors = (*inputs.trained.values(), *inputs.others.values())
            self._clients = (inputs.names(), *((t.shape[1:], t.dtype, t.device) for t in tensors))
        return (*self._clients, *((t.shape, t.stride(), t.dtype) for t in inputs.batch))

    def _build(self, key: Key, inputs: StepInputs, index: int) -> None:
        """Make a graph and try it on copies."""
        before = GeneratorStates.read(HOST)
        try:
            graph = _compiled(self._compute, inputs, index)
            if not GeneratorStates.read(HOST).is_as_on_host(before):
                before.restore(HOST)
                self._refuse("training_step draws from Python's or NumPy's generator, which a graph would do only once")
                return
            with _generators_kept(inputs):
                graph(inputs.with_own_buffers().tensors())
            self._steps.graphs[key] = graph
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(f"torch.compile failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")

    def _refuse(self, reason: str) -> None:
        self._steps.refused = True
        self._steps.graphs.clear()
        self._log(f"{reason}; going on without compiling")


def compile_graph(graph: nn.Module) -> Callable[..., list[Tensor]]:
    """Compile a graph of tensor operations, of fixed shapes."""
    # Inductor's own generator would make other draws than the step that is not compiled.
    return torch.compile(graph, fullgraph=True, dynamic=False, options={"fallback_random": True})


def _compiled(compute: Computation, inputs: StepInputs, index: int) -> Graph:
    names: list[tuple[str, ...]] = []

    def step(*tensors: Tensor) -> list[Tensor]:
        found = compute(inputs.like(tensors), index)
        parts = (found.terms, found.gradients, found.assigned)
        names[:] = [tuple(part) for part in parts]
        return [tensor for part in parts for tensor in part.values()]

    with _generators_kept(inputs), torch.autograd.set_multithreading_enabled(False):
        traced = make_fx(step)(*inputs.with_own_buffers().tensors())
    compiled = compile_graph(traced)

    def run(tensors: list[Tensor]) -> StepOutputs:
        with torch.no_grad():
            values = iter(compiled(*tensors))
        terms, gradients, assigned = ({name: next(values) for name in part} for part in names)
        return StepOutputs(terms, gradients, assigned)

    return run


def _generators_kept(inputs: StepInputs) -> Any:
    """Context manager that restores torch's generators, so that numbers drawn inside are drawn again afterwards."""
    device = inputs.batch[0].device
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


# ---------------------------------------------------------------------- CUDA graphs

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
    return; so is everything once a capture has failed, or where a step draws random numbers: their streams under
    replay are not those that seeds give elsewhere.

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
        """See :class:`~pfl_lightning.engines.vectorized.step.Computation`."""
        if self._refused or not inputs.in_place:
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
        if self._captured is None:
            return self._compute(inputs, index)
        own, outputs = self._captured
        for part, filled in zip(inputs.batch, own.batch, strict=True):
            filled.copy_(part, non_blocking=True)
        self._recorder.replay()
        return outputs

    def settled(self, inputs: StepInputs) -> bool:
        """Whether the graph exists, or there will be none."""
        return self._captured is not None or self._refused

    def _warm_up(self, recorder: CudaGraph, inputs: StepInputs, index: int) -> StepOutputs:
        settled = self._compute.settled(inputs)
        device = inputs.batch[0].device
        before = GeneratorStates.read(device)
        outputs = recorder.warm_up(lambda: self._compute(inputs, index))
        if not GeneratorStates.read(device).is_as(before):
            self._refuse("training_step draws random numbers (dropout, say)")
        self._warmed_up += settled
        return outputs

    def _capture(self, recorder: CudaGraph, inputs: StepInputs, index: int) -> tuple[StepInputs, StepOutputs] | None:
        own = replace(inputs, batch=tuple(part.clone() for part in inputs.batch))
        try:
            return own, recorder.capture(lambda: self._compute(own, index))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(f"the capture failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
            return None

    def _refuse(self, reason: str) -> None:
        self._refused, self._captured, self._recorder = True, None, None
        self._log(f"{reason}; its steps are launched without CUDA graphs")


# ---------------------------------------------------------------------- both


class ComputationFactory:
    """Factory of the computation of each phase, which keeps compiled graphs from round to round.

    Args:
        compile: Whether steps are compiled.
        cuda_graphs: Whether they are captured as CUDA graphs.
        log: Logs a line once.

    Attributes:
        accelerate: Whether steps are compiled or captured.
    """

    def __init__(self, compile: bool, cuda_graphs: bool, log: Callable[[str], None]) -> None:
        self._compile, self._cuda_graphs, self._log = compile, cuda_graphs, log
        self.accelerate = compile or cuda_graphs
        self._compiled = PerModule[dict[Key, CompiledSteps]]()

    def make(self, client: FederatedClient, phase: Phase, environment: FitEnvironment) -> Computation:
        """Computation of a phase, for the module in that phase."""
        computation: Computation = EagerComputation(client, environment)
        if self.accelerate and uses_batch_index(client):
            name = type(client).__name__
            self._log(f"{name}.training_step uses the number of the batch; its steps are not compiled or captured")
            return computation
        if self._compile:
            computation = CompiledComputation(computation, self._steps_of(client, phase, environment), self._log)
        recorder = recorder_for(environment.device) if self._cuda_graphs else None
        if recorder is not None:
            return GraphedComputation(computation, recorder, self._log)
        if self._cuda_graphs:
            self._log(f"cuda_graphs needs a CUDA device and has no effect on {environment.device.type!r}")
        return computation

    def _steps_of(self, client: FederatedClient, phase: Phase, environment: FitEnvironment) -> CompiledSteps:
        """Graphs compiled for the phase and the module's current Python attributes."""
        modules = tuple((name, type(module), module.training) for name, module in client.named_modules())
        kind = (phase, modules, environment.precision_name, type(environment.precision))
        attributes = {name: own.content for name, own in python_state(client).items()}
        known = self._compiled.setdefault(client, {})
        if kind not in known or not equal_attributes(known[kind].attributes, attributes):
            known[kind] = CompiledSteps(attributes)
        return known[kind]


def recorder_for(device: torch.device) -> Callable[[torch.device], CudaGraph] | None:
    """Class that records work on a device; ``None`` if there is none."""
    return CudaGraph if device.type == "cuda" else None
