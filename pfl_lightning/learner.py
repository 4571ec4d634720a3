"""A network that the server trains, saved in checkpoints together with its optimizer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from pfl_lightning.checks import check_number
from pfl_lightning.functional.tensor_lists import magnitudes
from pfl_lightning.state.image import Snapshot
from pfl_lightning.state.tensors import tensors_in

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer from the parameters that it steps."""

Objective = Callable[[], Tensor]
"""Computes the scalar that a step descends, from the network as it is then."""


class Learner(nn.Module):
    """A network of the server with its optimizer.

    An aggregator holds it as an attribute and calls :meth:`learn` in its ``aggregate``, since what is sent must not
    change within a round. A resumed run has the same weights and the same momentum, at the rates that are
    configured now. Numbers are in single
    precision at least, also where clients train in half precision.

    What the network gives to a broadcast must not carry a graph: compute it under :meth:`evaluating`.

    Args:
        network: The network; all its parameters that require gradients train.
        make_optimizer: Makes the optimizer from the parameters.
        clip: Largest norm of the gradient of a step, over all parameters; ``None`` does not clip.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from pfl_lightning.learner import Learner
        >>> line = torch.nn.Linear(1, 1, bias=False)
        >>> learner = Learner(line, partial(torch.optim.SGD, lr=0.5))
        >>> learner.learn([lambda: line.weight.sum()], round=0, remedy="lower the rate")  # the gradient is 1
        True
        >>> learner.learn([lambda: line.weight.square().sum()], round=1, remedy="lower the rate")  # to the minimum
        True
        >>> line.weight.item()
        0.0
    """

    not_checkpointed: ClassVar[tuple[str, ...]] = ("optimizer",)
    """The extra state saves it, which a look at Python attributes does not see."""

    def __init__(
        self,
        network: nn.Module,
        make_optimizer: MakeOptimizer,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        check_number("clip", clip, strict=True, optional=True)
        self.network, self.clip, self._make_optimizer = network, clip, make_optimizer
        self.optimizer = make_optimizer(network.parameters())

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(self.network.parameters()).device

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Neither gradients nor autocast inside the block, for what is sent."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def learn(self, objectives: Iterable[Objective], round: int, remedy: str) -> bool:
        """Take one step of the optimizer for each objective, in their order.

        Where the network or the optimizer's state is not finite afterwards, both are what they were before, with a
        warning.

        Args:
            objectives: What the steps descend.
            round: Number of the round, from 0, for the warning.
            remedy: What the warning advises.

        Returns:
            Whether the steps were kept.
        """
        before = Snapshot(self)  # which shares the copies by which the round is undone
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            for objective in objectives:
                self.optimizer.zero_grad()
                objective().backward()  # type: ignore[no-untyped-call]
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
                self.optimizer.step()
        self._end_steps()
        if all_finite((*self.network.state_dict().values(), *tensors_in(self.optimizer.state))):
            return True
        before.restore()
        warn_of_taken_back("the server's network", round, remedy)
        return False

    def step_along(self, gradients: Iterable[Tensor]) -> None:
        """Take one step of the optimizer along given gradients, in the order of the parameters, of whatever numbers."""
        for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self._end_steps()

    def _end_steps(self) -> None:
        self.optimizer.zero_grad()
        for tensor in (*self.network.parameters(), *tensors_in(self.optimizer.state)):
            increment_version(tensor)  # which fused steps leave as it was

    # ------------------------------------------------------------------ devices and checkpoints

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Learner:
        """Move the network and the optimizer's state, in single precision at least."""

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return fn(tensor)
            like = fn(tensor.new_empty(0))
            return tensor.to(like.device, torch.promote_types(like.dtype, torch.float32))

        state = self.optimizer.state_dict()
        super()._apply(moved, recurse)
        self.optimizer = self._make_optimizer(self.network.parameters())  # parameters may be new objects
        self.optimizer.load_state_dict(state)  # to the parameters' device and type
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """State of the optimizer."""
        return self.optimizer.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the momentum; a copy, since a checkpoint's tensors may be views of its file.

        Rates and whatever else is configured are those of the optimizer that was made, also where they have changed.
        """
        configured = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**copy.deepcopy(state), "param_groups": configured})


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no tensor holds NaN or infinity."""
    return all(map(math.isfinite, magnitudes(list(tensors))))


def warn_of_taken_back(what: str, round: int, remedy: str, stacklevel: int = 3) -> None:
    """Warn that something the server trains became non-finite and is as before the round.

    Args:
        what: What was trained, such as ``"the server's head"``.
        round: Number of the round, from 0.
        remedy: What to do.
        stacklevel: Frames between the warning and the code that it names.
    """
    warnings.warn(
        f"round {round + 1}: {what} is kept as it was, since its new values are not finite; {remedy}",
        stacklevel=stacklevel,
    )
