"""Factory of computations: eager, compiled or captured steps, by the engine's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.vectorized.computation.compiled import CompiledComputation, CompiledSteps
from pfl_lightning.engines.vectorized.computation.cuda_graph import CudaGraph, GraphedComputation, Recorder
from pfl_lightning.engines.vectorized.computation.eager import Computation, EagerComputation
from pfl_lightning.engines.vectorized.groups import PerModule
from pfl_lightning.engines.vectorized.limits import equal_attributes, python_state, uses_batch_index
from pfl_lightning.fit.tasks import FitEnvironment

__all__ = ["ComputationFactory"]

MOST_STATES = 4
"""Sets of Python attributes of a module for which graphs are kept: with its encoder and on features, say."""

NOWHERE = nn.Module()


class ComputationFactory:
    """Factory of the computation of each phase, which keeps compiled graphs from round to round.

    Args:
        compile: Whether steps are compiled.
        cuda_graphs: Whether they are captured as CUDA graphs.
        say: Logs a line once.

    Attributes:
        accelerate: Whether steps are compiled or captured.
    """

    def __init__(self, compile: bool, cuda_graphs: bool, say: Callable[[str], None]) -> None:
        self._compile, self._cuda_graphs, self._say = compile, cuda_graphs, say
        self.accelerate = compile or cuda_graphs
        self._compiled = PerModule[list[CompiledSteps]]()

    def make(self, client: FederatedClient, phase: Phase, environment: FitEnvironment) -> Computation:
        """Computation of a phase, for the module in that phase."""
        computation: Computation = EagerComputation(client, environment)
        if self.accelerate and uses_batch_index(client):
            name = type(client).__name__
            self._say(f"{name}.training_step uses the number of the batch; its steps are not compiled or captured")
            return computation
        if self._compile:
            computation = self._compiling(computation, client, phase, environment)
        if self._cuda_graphs:
            computation = self._capturing(computation, environment)
        return computation

    def _capturing(self, computation: Computation, environment: FitEnvironment) -> Computation:
        recorder = recorder_for(environment.device)
        if recorder is None:
            self._say(f"cuda_graphs needs a CUDA device and has no effect on {environment.device.type!r}")
            return computation
        return GraphedComputation(computation, recorder, self._say)

    def _compiling(
        self, computation: Computation, client: FederatedClient, phase: Phase, environment: FitEnvironment
    ) -> Computation:
        modules = tuple((name, type(module), module.training) for name, module in client.named_modules())
        kind = (phase, modules, environment.precision_name, type(environment.precision))
        return CompiledComputation(computation, self._steps_of(client), kind, self._say)

    def _steps_of(self, client: FederatedClient) -> CompiledSteps:
        """Graphs compiled for the module's current Python attributes."""
        attributes = python_state(client)
        known = self._compiled.setdefault(client, [])
        found = next((steps for steps in known if equal_attributes(steps.attributes, attributes)), None)
        if found is None:
            # Without the modules, which would be kept alive.
            found = CompiledSteps({name: replace(own, module=NOWHERE) for name, own in attributes.items()})
            known[:] = [*known[-MOST_STATES + 1 :], found]
        return found


def recorder_for(device: torch.device) -> Callable[[torch.device], Recorder] | None:
    """Class that records work on a device; ``None`` if there is none."""
    return CudaGraph if device.type == "cuda" else None
