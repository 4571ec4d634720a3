"""Computations of steps: as they are, compiled as one graph of forward and backward pass, or captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.vectorized.cuda_graph import CudaGraph, GraphedComputation
from pfl_lightning.engines.vectorized.groups import PerModule
from pfl_lightning.engines.vectorized.limits import PythonState, equal_attributes, python_state, uses_batch_index
from pfl_lightning.engines.vectorized.step import Computation, EagerComputation, StepInputs, StepOutputs
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.seeding import GeneratorStates

__all__ = ["CompiledComputation", "CompiledSteps", "ComputationFactory"]

USES = 10
"""Steps of a shape before it is compiled: compilation pays off after many of them."""
MAX_GRAPHS = 8
"""Largest number of graphs of one module; further shapes are not compiled."""

HOST = torch.device("cpu")

Key = tuple[Any, ...]
Graph = Callable[[list[Tensor]], StepOutputs]


@dataclass
class CompiledSteps:
    """Graphs of one module, kept for all rounds.

    Attributes:
        attributes: The module's Python attributes, which the graphs hold as constants.
        uses: Number of steps of each shape.
        graphs: Graphs by shape.
        refused: Whether compiling has been given up.
    """

    attributes: PythonState = field(default_factory=dict)
    uses: dict[Key, int] = field(default_factory=dict)
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
        kind: Key of a graph in addition to shapes.
        log: Logs a line once.
    """

    def __init__(self, compute: Computation, steps: CompiledSteps, kind: Key, log: Callable[[str], None]) -> None:
        self._compute, self._steps, self._kind, self._log = compute, steps, kind, log
        self._clients: Key | None = None

    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """See :class:`~pfl_lightning.engines.vectorized.step.Computation`."""
        key = self._key(inputs)
        if key not in self._steps.graphs:
            self._steps.uses[key] = self._steps.uses.get(key, 0) + 1
            if self.settled(inputs) or self._steps.uses[key] < USES:
                return self._run_plainly(inputs, index)
            if not self._build(key, inputs, index):
                return self._compute(inputs, index)
        return self._steps.graphs[key](inputs.tensors())

    def settled(self, inputs: StepInputs) -> bool:
        """Whether there is a graph, or will be none."""
        steps = self._steps
        return steps.refused or len(steps.graphs) >= MAX_GRAPHS or self._key(inputs) in steps.graphs

    def _key(self, inputs: StepInputs) -> Key:
        if self._clients is None:  # what is equal for any number of clients
            tensors = (*inputs.trained.values(), *inputs.others.values())
            self._clients = (inputs.names(), *((t.shape[1:], t.dtype, t.device) for t in tensors))
        batch = ((t.shape, t.stride(), t.dtype) for t in inputs.batch)
        return (*self._kind, *self._clients, *batch)

    def _run_plainly(self, inputs: StepInputs, index: int) -> StepOutputs:
        if self._steps.refused:
            return self._compute(inputs, index)
        before = GeneratorStates.read(HOST)  # that of a GPU cannot be read while a CUDA graph captures this
        found = self._compute(inputs, index)
        if not GeneratorStates.read(HOST).is_as_on_host(before):
            self._refuse("training_step draws from Python's or NumPy's generator, which a graph would do only once")
        return found

    def _build(self, key: Key, inputs: StepInputs, index: int) -> bool:
        """Make a graph and try it on copies; whether it may be used."""
        try:
            graph = _compiled(self._compute, inputs, index)
            with _generators_kept(inputs):
                graph(inputs.with_own_buffers().tensors())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(f"torch.compile failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
            return False
        self._steps.graphs[key] = graph
        return True

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


MAX_STATES = 4
"""Sets of Python attributes of a module for which graphs are kept: with its encoder and on features, say."""

NOWHERE = nn.Module()


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
        self._compiled = PerModule[list[CompiledSteps]]()

    def make(self, client: FederatedClient, phase: Phase, environment: FitEnvironment) -> Computation:
        """Computation of a phase, for the module in that phase."""
        computation: Computation = EagerComputation(client, environment)
        if self.accelerate and uses_batch_index(client):
            name = type(client).__name__
            self._log(f"{name}.training_step uses the number of the batch; its steps are not compiled or captured")
            return computation
        if self._compile:
            computation = self._compiling(computation, client, phase, environment)
        if self._cuda_graphs:
            computation = self._capturing(computation, environment)
        return computation

    def _capturing(self, computation: Computation, environment: FitEnvironment) -> Computation:
        recorder = recorder_for(environment.device)
        if recorder is None:
            self._log(f"cuda_graphs needs a CUDA device and has no effect on {environment.device.type!r}")
            return computation
        return GraphedComputation(computation, recorder, self._log)

    def _compiling(
        self, computation: Computation, client: FederatedClient, phase: Phase, environment: FitEnvironment
    ) -> Computation:
        modules = tuple((name, type(module), module.training) for name, module in client.named_modules())
        kind = (phase, modules, environment.precision_name, type(environment.precision))
        return CompiledComputation(computation, self._steps_of(client), kind, self._log)

    def _steps_of(self, client: FederatedClient) -> CompiledSteps:
        """Graphs compiled for the module's current Python attributes."""
        attributes = python_state(client)
        known = self._compiled.setdefault(client, [])
        found = next((steps for steps in known if equal_attributes(steps.attributes, attributes)), None)
        if found is None:
            # Without the modules, which would be kept alive.
            found = CompiledSteps({name: replace(own, module=NOWHERE) for name, own in attributes.items()})
            known[:] = [*known[-MAX_STATES + 1 :], found]
        return found


def recorder_for(device: torch.device) -> Callable[[torch.device], CudaGraph] | None:
    """Class that records work on a device; ``None`` if there is none."""
    return CudaGraph if device.type == "cuda" else None
