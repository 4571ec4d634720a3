"""How many threads torch computes on while an engine runs: a rule that depends on the model and the batch alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.tasks import FitEnvironment
from pfl_lightning.seeding import torch_seed

__all__ = ["HeldThreads", "chosen_threads", "threads_for_work", "work_of"]

WORK_FOR_TWO = 2e9
"""Floating-point operations of a step's forward pass from which a second thread pays (``benchmarks/threads.py``)."""

STEEPNESS = 16
"""Times the work for twice the threads: steps so long lose little where there are fewer cores than threads."""

MOST_THREADS = 8
"""More is left to worker processes, or to an option."""

_WORK = WeakKeyDictionary[nn.Module, tuple[torch.Size, float]]()
"""Shape of a sample and work by encoder, so that each is counted once."""

_AT_IMPORT = torch.get_num_threads()


def chosen_threads(
    models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment, *, say: bool
) -> int | None:
    """Threads for the largest of the models; ``None`` leaves the number as it is.

    It is left on a GPU, where the user has set it, and for a user's LightningModule, whose local fits go as in a plain
    run of its project.

    Args:
        models: Module of each architecture.
        data: Every client's data.
        environment: Settings of the run.
        say: Whether to tell what was chosen.
    """
    own = environment.device.type != "cpu" or any(model.step_module is not model for model in models)
    if own or is_set_by_user():
        return None
    samples = next(data.client_data(0).train.split(2)).loader(2).tensors()[0]
    work = max(_known_work(model.encoder, samples) * model.views for model in models) * data.batch_size
    threads = threads_for_work(work)
    if say:
        rank_zero_info(
            f"Threads of local fits: {threads}, since a training step takes {work / 1e9:.2g} GFLOP forward. Another "
            "number is the engine's option threads, or OMP_NUM_THREADS"
        )
    return threads


def threads_for_work(work: float) -> int:
    """1 thread for small steps, 2 from :data:`WORK_FOR_TWO`, and twice as many for every 16 times the work.

    Args:
        work: Floating-point operations of a step's forward pass.

    Example:
        >>> from pfl_lightning.engines.threads import threads_for_work
        >>> [threads_for_work(work) for work in (1e6, 2e9, 3e10, 4e10, 1e15)]
        [1, 2, 2, 4, 8]
    """
    threads, least = 1, WORK_FOR_TWO
    while work >= least and threads < MOST_THREADS:
        threads, least = 2 * threads, STEEPNESS * least
    return threads


def _known_work(encoder: nn.Module, samples: Tensor) -> float:
    shape, work = _WORK.get(encoder, (None, 0.0))
    if shape != samples.shape[1:]:
        work = work_of(encoder, samples)
        _WORK[encoder] = samples.shape[1:], work
    return work


@torch.no_grad()
def work_of(encoder: nn.Module, samples: Tensor) -> float:
    """Floating-point operations of an encoder's forward pass over one sample, at least two for each of its parameters.

    Layers that torch does not count (recurrent ones) are counted by their parameters; tables of embeddings are not.

    Args:
        encoder: The network; it stays as it is.
        samples: One sample or more, (n, ...).
    """
    modes = {module: module.training for module in encoder.modules()}
    parameter = next(encoder.parameters(), samples)
    inputs = samples.to(parameter.device, parameter.dtype if samples.is_floating_point() else None)
    with torch_seed(0), FlopCounterMode(display=False) as counter:
        encoder.eval()(inputs)
    for module, mode in modes.items():
        module.training = mode
    tables = {id(module.weight) for module in encoder.modules() if isinstance(module, nn.Embedding)}
    weights = sum(p.numel() for p in encoder.parameters() if id(p) not in tables)
    return float(max(counter.get_total_flops() / len(samples), 2 * weights))


def is_set_by_user() -> bool:
    """Whether the number of threads was set in the environment, or by ``torch.set_num_threads``, as far as can be seen.

    What was set before this package was imported is seen where it is not the number of the machine's cores.
    """
    if os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
        return True
    return torch.get_num_threads() != _AT_IMPORT or _AT_IMPORT not in _numbers_of_cores(_AT_IMPORT)


def _numbers_of_cores(default: int) -> set[int]:
    """Numbers that torch may start with: processors, or cores of several processors each, that the process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return {default}
    processors = os.sched_getaffinity(0)
    files = [Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list") for number in processors]
    try:
        cores = {file.read_text() for file in files}
    except OSError:
        return {default}
    return {len(processors), len(cores), os.cpu_count() or default}


@dataclass
class HeldThreads:
    """Number of torch's threads that is held from one call to another.

    Attributes:
        held: Number that was set; ``None`` where none is held.
        before: The caller's.
    """

    held: int | None = None
    before: int = 0

    def hold(self, threads: int | None) -> None:
        """Set a number; ``None`` leaves it as it is."""
        self.release()
        if threads is not None:
            self.held, self.before = threads, torch.get_num_threads()
            torch.set_num_threads(threads)

    def release(self) -> None:
        """Give the caller's number back, unless another one was set meanwhile."""
        if self.held is not None and torch.get_num_threads() == self.held:
            torch.set_num_threads(self.before)
        self.held = None

    @contextmanager
    def holding(self, choose: Callable[[], int | None]) -> Iterator[None]:
        """Hold a number inside, unless one is held already."""
        if self.held is not None:
            yield
            return
        self.hold(choose())
        try:
            yield
        finally:
            self.release()
