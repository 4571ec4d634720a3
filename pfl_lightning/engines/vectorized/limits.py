"""Limits of vectorization: checks of clients and optimizers, and explanations of failures."""

from __future__ import annotations

import copy
import dis
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import lightning
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.isolation_check import HOOKS, SET_BY_ENGINES
from pfl_lightning.engines.sequential import HOOKS_NOT_TAKEN, HOOKS_TAKEN
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.state.equality import same

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop")
ENGINES_OWN = SET_BY_ENGINES - set(HOOKS)
"""Attributes of modules that the engines and torch itself set, but for hooks around passes."""
STEP_METHODS = ("training_step", "loss_terms")
"""Methods of which the class that has the last word says whether they average over samples."""
NOT_OF_USER = (
    *(str(Path(str(module.__file__)).parent) for module in (torch, lightning)),
    str(Path(__file__).parents[1]),
)


class CannotVectorizeError(Exception):
    """Clients cannot be trained, or evaluated, together; the reason is logged once, and they run one by one.

    Args:
        reason: The reason, with the user's line where it is known.
        silent: Whether the reason is not logged: it was logged before, or a run one by one ends in a better error.
    """

    def __init__(self, reason: str, silent: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.silent = reason, silent


class PaddingError(CannotVectorizeError):
    """Batches of clients cannot be padded, although they declare that their loss is a mean over samples."""


class NoLogs(dict[str, list[Tensor]]):
    """Stand-in for the record of a client's logged values, which refuses them where they are logged."""

    def setdefault(self, key: str, default: Any = None) -> NoReturn:
        """Refuse what is logged under the name ``key``."""
        raise ConfigurationError(
            f"{key!r} is logged by side effect ({_users_line()}), which VectorizedEngine cannot do for many clients "
            "at once; return it in training_step's dictionary instead, or use SequentialEngine"
        )


def refuse_unusual(client: FederatedClient) -> None:
    """Refuse to vectorize a client's fits, as far as what is against it is visible beforehand.

    Raises:
        CannotVectorizeError: Says what it is.
    """
    name = type(client).__name__
    if client.step_module is not client:
        raise CannotVectorizeError(f"{name} trains a LightningModule of its own ({type(client.step_module).__name__})")
    if not client.automatic_optimization:
        raise CannotVectorizeError(f"{name} uses manual optimization")
    for hook in (*HOOKS_TAKEN, *HOOKS_NOT_TAKEN):
        if is_overridden(hook, client):
            raise CannotVectorizeError(f"{name} overrides {hook}")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to treat every number of a parameter alone, as stacked parameters need."""
    known = (getattr(torch.optim, name) for name in ELEMENTWISE)
    # Unwrapped, since torch wraps the step of each class when it is first used.
    steps = (inspect.unwrap(kind.step) for kind in known if isinstance(optimizer, kind))
    return inspect.unwrap(type(optimizer).step) in steps


def uses_batch_index(client: FederatedClient) -> bool:
    """Whether the client's ``training_step`` uses the number of the batch."""
    step = type(client).training_step
    if client.user_module is not None or step is FederatedClient.training_step:
        return client.user_module is not None  # to whose step the client hands it on
    code = getattr(step, "__code__", None)
    if code is None or code.co_argcount < 3:
        return True
    name = code.co_varnames[2]
    names = (i.argval for i in dis.get_instructions(step) if "LOAD" in i.opname)
    return any(found == name or (isinstance(found, tuple) and name in found) for found in names)


def averages_samples(client: FederatedClient) -> bool:
    """Whether the loss of a step is a mean over samples, each of which the network treats alone, as far as declared."""
    owners = (next(kind for kind in type(client).__mro__ if name in vars(kind)) for name in STEP_METHODS)
    declared = all(vars(owner).get("averages_samples", False) for owner in owners)
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in client.modules())
    return declared and not normed and client.user_module is None


# ---------------------------------------------------------------------- Python state


@dataclass(frozen=True, eq=False)
class _Attribute:
    """Attribute of a module; of a list, a dictionary or a set ``content`` is a shallow copy, otherwise the value."""

    module: nn.Module
    value: Any
    content: Any

    def restore(self, key: str) -> None:
        vars(self.module)[key] = self.value
        if isinstance(self.value, list):
            self.value[:] = self.content
        elif isinstance(self.value, dict | set):
            self.value.clear()
            self.value.update(self.content)


PythonState = dict[str, _Attribute]


def python_state(client: FederatedClient) -> PythonState:
    """Python attributes of the client's modules, which the clients of a stack would share."""
    return {
        f"{prefix}.{key}" if prefix else key: _Attribute(
            module, value, copy.copy(value) if isinstance(value, list | dict | set) else value
        )
        for prefix, module in client.named_modules()
        for key, value in vars(module).items()
        if key not in ENGINES_OWN
    }


def refuse_changes(client: FederatedClient, before: PythonState, where: str) -> None:
    """Refuse attributes that were added, removed or re-assigned, or whose lists, dictionaries or sets changed.

    Raises:
        CannotVectorizeError: An attribute changed; the message names it and ``where`` it changed.
    """
    changed = _changed(before, python_state(client))
    if changed:
        raise CannotVectorizeError(
            f"{type(client).__name__} changes the attribute {changed[0]!r} in {where}, where clients trained together "
            "would share it (a non-persistent buffer would be each client's own)"
        )


@contextmanager
def guarded_attributes(client: FederatedClient) -> Iterator[Callable[[str], None]]:
    """Context manager with :func:`refuse_changes` for its block; on a failure, attributes are restored for a new try.

    Yields:
        A function that takes the name of the client's code that has just run.
    """
    before = python_state(client)
    try:
        yield lambda where: refuse_changes(client, before, where)
    except (CannotVectorizeError, ClientError, torch.OutOfMemoryError):
        for name, own in python_state(client).items():
            if name not in before:
                del vars(own.module)[name.rpartition(".")[2]]
        for name, own in before.items():
            own.restore(name.rpartition(".")[2])
        raise


def _changed(before: PythonState, after: PythonState) -> list[str]:
    kept = {name for name, own in before.items() if name in after and _alike(own.content, after[name].content)}
    return [name for name in {**before, **after} if name not in kept]


def _alike(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and same(one, other))


# ---------------------------------------------------------------------- explanations


@contextmanager
def explained(client: FederatedClient) -> Iterator[None]:
    """Inside, an error of the client's vectorized ``training_step`` becomes one that names the user's line.

    Raises:
        CannotVectorizeError: The step cannot be vectorized.
    """
    try:
        yield
    except (torch.OutOfMemoryError, CannotVectorizeError, ConfigurationError):
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        one_sample = said.startswith("Expected more than 1 value per channel")
        where = _users_line(traceback.extract_tb(error.__traceback__))
        reason = f"{type(client).__name__}.training_step, {where}: {said[:200]}"
        raise CannotVectorizeError(reason, silent=one_sample) from error


def _users_line(frames: traceback.StackSummary | None = None) -> str:
    """Innermost line of a trace, or of the call, that is neither torch's, nor Lightning's, nor the engine's."""
    own = [f for f in frames or traceback.extract_stack() if not f.filename.startswith(NOT_OF_USER)]
    own = [f for f in own if f.name not in ("log", "log_dict")]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "in no line of its own"
