"""Step compiled as one graph of its forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pfl_lightning.engines.generators import host_generators
from pfl_lightning.engines.vectorized.computation.eager import Computation, StepInputs, StepOutputs
from pfl_lightning.engines.vectorized.limits import PythonState

__all__ = ["CompiledComputation", "CompiledSteps"]

USES = 10
"""Steps of a shape before it is compiled: compilation pays off after many of them."""
MOST = 8
"""Largest number of graphs of one module; further shapes are not compiled."""

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
        say: Logs a line once.
    """

    def __init__(self, compute: Computation, steps: CompiledSteps, kind: Key, say: Callable[[str], None]) -> None:
        self._compute, self._steps, self._kind, self._say = compute, steps, kind, say
        self._clients: Key | None = None

    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """See :class:`~pfl_lightning.engines.vectorized.computation.eager.Computation`."""
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
        return steps.refused or len(steps.graphs) >= MOST or self._key(inputs) in steps.graphs

    def _key(self, inputs: StepInputs) -> Key:
        if self._clients is None:  # what is equal for any number of clients
            tensors = (*inputs.trained.values(), *inputs.frozen.values(), *inputs.buffers.values())
            self._clients = (inputs.names(), *((t.shape[1:], t.dtype, t.device) for t in tensors))
        batch = ((t.shape, t.stride(), t.dtype) for t in inputs.batch())
        return (*self._kind, *self._clients, *batch)

    def _run_plainly(self, inputs: StepInputs, index: int) -> StepOutputs:
        if self._steps.refused:
            return self._compute(inputs, index)
        before = host_generators()
        found = self._compute(inputs, index)
        if host_generators() != before:
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
        self._say(f"{reason}; going on without compiling")


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
    device = inputs.inputs.device
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
