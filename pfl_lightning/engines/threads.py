"""Number of threads of torch while an engine runs: a rule that depends on the model and the batch alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.seeding import torch_seed

LEAST_WORK = ((512e9, 8), (32e9, 4), (2e9, 2))
"""Floating-point operations of a step's forward pass from which so many threads pay (``benchmarks/threads.py``).

It is steep: steps so long lose little where there are fewer cores than threads.
"""

_AT_IMPORT = torch.get_num_threads()


def is_set_by_user() -> bool:
    """Whether the number of threads was set in the environment, or by ``torch.set_num_threads`` since the import."""
    named = os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")
    return bool(named) or torch.get_num_threads() != _AT_IMPORT


def threads_for_work(work: float) -> int:
    """The number of threads for the work of a training step.

    Args:
        work: Floating-point operations of a step's forward pass.

    Example:
        >>> from pfl_lightning.engines.threads import threads_for_work
        >>> [threads_for_work(work) for work in (1e6, 2e9, 3e10, 4e10, 1e15)]
        [1, 2, 2, 4, 8]
    """
    return next((threads for least, threads in LEAST_WORK if work >= least), 1)


def step_work(models: Sequence[FederatedClient], data: FederatedData) -> float:
    """Floating-point operations of the forward pass of a training step of the largest model.

    Args:
        models: Module of each architecture.
        data: Every client's data.
    """
    samples = next(data.client_data(0).train.split(2)).loader(2).tensors()[0]
    return max(work_of(model.encoder, samples) * model.views for model in models) * data.batch_size


@torch.no_grad()
def work_of(encoder: nn.Module, samples: Tensor) -> float:
    """Floating-point operations of an encoder's forward pass over one sample, at least two for each of its parameters.

    Layers that torch does not count (recurrent ones) are counted by their parameters; tables of embeddings are not.

    Args:
        encoder: The network; it stays as it is.
        samples: One sample or more, (n, ...).
    """
    parameter = next(encoder.parameters(), samples)
    inputs = samples.to(parameter.device, parameter.dtype if samples.is_floating_point() else None)
    with torch_seed(0), evaluating(encoder), FlopCounterMode(display=False) as counter:
        encoder(inputs)
    tables = {id(module.weight) for module in encoder.modules() if isinstance(module, nn.Embedding)}
    weights = sum(p.numel() for p in encoder.parameters() if id(p) not in tables)
    return float(max(counter.get_total_flops() / len(samples), 2 * weights))
