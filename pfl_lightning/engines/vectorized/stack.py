"""Stack of clients of one architecture: their states along a leading axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.engines.lifecycle import (
    begin,
    enter_phase,
    failure,
    give_back,
    load_own_state,
    temporary_buffers,
    without_autocast,
)
from pfl_lightning.engines.sequential import frozen_features
from pfl_lightning.errors import ClientError
from pfl_lightning.fit.tasks import EvaluationTask, FitEnvironment, FitTask
from pfl_lightning.functional.tensor_lists import write
from pfl_lightning.messages import State
from pfl_lightning.seeding import GeneratorStates, Purpose, derive_seed, torch_seed
from pfl_lightning.state.tensors import TensorDict


@dataclass(eq=False)
class Member:
    """Client in a vectorized fit, or in the fine-tuning before a vectorized evaluation.

    Attributes:
        task: The fit or evaluation task.
        context: Context of the fit: client, round and data.
        phases: The client's phases, of the fit or of the fine-tuning.
        before: Return value of ``before_fit``.
        state: All parameters and buffers, as views of the stack.
        random_state: States of the generators after ``before_fit``, with which ``make_update`` continues.
        features: Features of all samples at the received encoder, if the first phase may run on them.
        losses: Means of the loss terms, one for each phase that had the term.
        num_steps: Number of optimizer steps taken.
        is_cut: Whether ``max_steps`` of the context has ended the fit, with batches left.
        error: Error of the fit, if it failed.
    """

    task: FitTask | EvaluationTask
    context: FitContext
    phases: tuple[Phase, ...] = ()
    before: Any = None
    state: State = field(default_factory=dict)
    random_state: GeneratorStates | None = None
    features: Tensor | None = None
    losses: dict[str, list[float]] = field(default_factory=dict)
    num_steps: int = 0
    is_cut: bool = False
    error: ClientError | None = None

    def kind(self, state: State) -> tuple[Any, ...]:
        """Key of the members that can be stacked together, with the state at their start."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in state.items())
        values = self.context.data.values
        public = None if self.context.public is None else self.context.public.of_round(self.context.round).values
        attached = tuple(None if found is None else found.shape[1:] for found in (values, public))
        return (self.phases, shapes, self.features is not None, attached)


def prepare(client: FederatedClient, task: FitTask, environment: FitEnvironment, cache_features: bool) -> Member:
    """Run a client's fit up to its first phase; the module is left in the client's state."""
    member, context = Member(task, task.context), task.context
    try:
        member.context = context = begin(client, task)
        seed = derive_seed(environment.seed, Purpose.FIT_MODEL, context.round, context.client)
        with without_autocast(environment), torch_seed(seed, python=True):
            member.before = client.before_fit(context)
            member.random_state = GeneratorStates.read(environment.device)
            member.phases = tuple(client.phases())
            if cache_features and member.phases:
                enter_phase(client, member.phases[0])
                member.features = frozen_features(client, context)
        _renew_buffers(client)
    except Exception as error:
        member.error = failure(error, client, context, environment).with_traceback(None)  # its frames hold the member
    return member


def prepare_evaluation(
    client: FederatedClient, task: EvaluationTask, environment: FitEnvironment, cache_features: bool
) -> Member:
    """Bring a client to the start of the fine-tuning before its evaluation."""
    load_own_state(client, task, environment)
    member = Member(task, task.context, tuple(client.personalization_phases()))
    if member.phases and cache_features:
        enter_phase(client, member.phases[0])
        with without_autocast(environment):
            member.features = frozen_features(client, task.context)
    return member


def full_state(client: FederatedClient) -> dict[str, Tensor]:
    """All parameters and buffers, the non-persistent ones included; not copied."""
    return {name: tensor.detach() for name, tensor in (*client.named_parameters(), *client.named_buffers())}


def places_of(client: FederatedClient) -> dict[str, str]:
    """Names of all places of parameters and buffers, with the name that :func:`full_state` has for each.

    A tied tensor has several places. A module with several names has its places once: under a second name,
    ``functional_call`` would not restore its tensors.
    """
    names, places = dict[int, str](), dict[str, str]()
    for prefix, module in client.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                place = f"{prefix}.{key}" if prefix else key
                places[place] = names.setdefault(id(tensor), place)
    return places


def _renew_buffers(client: FederatedClient) -> None:
    """Give the module copies of its non-persistent buffers: ``before_fit`` may have returned the tensors themselves.

    The next client would overwrite them. Parameters and persistent buffers get the client's values back for
    ``make_update``, and :class:`~pfl_lightning.state.tensors.TensorDict` is not written into.
    """
    own, copies = client.state_dict(keep_vars=True), dict[int, Tensor]()
    kept = {id(tensor) for tensor in own.values()}
    for module in client.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in kept and not isinstance(module, TensorDict):
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.clone()
                module._buffers[key] = copies[id(buffer)]


@contextmanager
def in_state(client: FederatedClient, state: State) -> Iterator[None]:
    """Let the module have a client's state, which :func:`full_state` returned, and afterwards its own tensors again.

    The module's tensors share the state's memory, into which changes go: nothing is copied.
    """
    tensors = {name: own for name, own in client.state_dict(keep_vars=True).items() if name in state}
    before, buffers = [own.data for own in tensors.values()], temporary_buffers(client)
    try:
        _share(tensors.values(), [state[name] for name in tensors])
        _put_buffers(client, state)
        yield
    finally:
        _share(tensors.values(), before)
        give_back(buffers)


def _share(tensors: Collection[Tensor], memory: Sequence[Tensor]) -> None:
    """Let tensors have this memory; whoever kept their versions is told that they have changed."""
    for tensor, other in zip(tensors, memory, strict=True):
        tensor.data = other
    increment_version(tensors)


def _put_buffers(client: FederatedClient, state: State) -> None:
    """Replace the non-persistent buffers, whose tensors may be a broadcast's (TensorDict does not copy)."""
    own, places = client.state_dict(), places_of(client)
    for prefix, module in client.named_modules():
        for key in list(module._buffers):
            name = f"{prefix}.{key}" if prefix else key
            if name in own or places.get(name, name) in state or module._buffers[key] is None:
                continue
            if isinstance(module, TensorDict):
                delattr(module, key)
            else:
                module._buffers[key] = None
    for name in [name for name in state if name not in own]:
        for place in {name, *(place for place, held in places.items() if held == name and place not in own)}:
            prefix, _, key = place.rpartition(".")
            client.get_submodule(prefix).register_buffer(key, state[name], persistent=False)


class Stack:
    """States of several clients of one kind along a leading axis.

    Args:
        most: Number of clients for which there is room.
        state: The state of one, whose shapes and types all have.
    """

    def __init__(self, most: int, state: State) -> None:
        self.members: list[Member] = []
        self.tensors = {name: own.new_empty((most, *own.shape)) for name, own in state.items()}

    def add(self, member: Member, state: State) -> None:
        """Copy a client's state into the next row."""
        write([tensor[len(self.members)] for tensor in self.tensors.values()], list(state.values()))
        self.members.append(member)
        member.state = self.row(member)

    def row(self, member: Member) -> dict[str, Tensor]:
        """State of one client; views, not copies."""
        index = self.members.index(member)
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def keep(self, members: Sequence[Member]) -> None:
        """Keep these members, in this order."""
        if list(members) == self.members:
            self.tensors = {name: tensor[: len(members)] for name, tensor in self.tensors.items()}
            return
        rows = [self.members.index(member) for member in members]
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]
        self.members = list(members)
