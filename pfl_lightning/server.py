"""Servers: the base of every method's aggregator, and the weighted mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import RunningAverage, server_step
from pfl_lightning.learner import Learner, MakeOptimizer
from pfl_lightning.messages import LARGEST, Broadcast, ClientUpdate
from pfl_lightning.seeding import seeded_generator
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.image import UnsavedState
from pfl_lightning.state.tensors import TensorDict, select_state

if TYPE_CHECKING:
    from pfl_lightning.client import FederatedClient

__all__ = ["AggregationWeights", "Aggregator", "AveragingAggregator"]

Receive = TypeVar("Receive", bound=Callable[..., None])

CHECKED_ROUNDS = 2
"""Rounds after which the server's unsaved state is looked at: what a method forgets shows after its first rounds."""

CLIENT_STATES = "client_states"
"""Name of the clients' states in a server's state_dict."""


@dataclass(frozen=True)
class AggregationWeights:
    """Weights of an aggregation that gives each client of the cohort its own combination of all updates.

    Attributes:
        clients: The cohort, in the order of the rows, m numbers.
        weights: Row i says how much client ``clients[i]`` gets of each client's, (m, m), on the CPU.
    """

    clients: tuple[int, ...]
    weights: Tensor


FORMER_NAMES = {"unsaved": "not_checkpointed", "undoes_clients": "rolls_back_client_states"}
"""Attributes of servers up to 0.3.0, which nothing reads any more, and their names now."""


def whole_or_not(receive: Receive) -> Receive:
    """Mark a ``receive`` that takes an update as a whole or not at all: nothing need be restored when it fails."""
    receive.__dict__["whole_or_not"] = True
    return receive


class Aggregator(nn.Module):
    """Base of every method's server.

    Within a round, :meth:`check` and then :meth:`receive` are called once for each update, in the order of the cohort
    (in a first round up to three updates are checked before they are received, one after the other), and at the end
    :meth:`aggregate` and :meth:`check_not_checkpointed` once. What :meth:`broadcast` gives must not depend on what was
    received since the last :meth:`aggregate`, and tensors that it has given must not change before: an engine may have
    sent clients out already when the first updates come. An aggregator that needs no more than sums keeps sums, so that
    its memory does not grow with the cohort.

    What it keeps from round to round stands in buffers or in :class:`~pfl_lightning.state.client_states.ClientStates`
    (one state for each client): both are saved in checkpoints. Buffers move to the device.

    Args:
        client: The client as it is before the first round; its state is the server's first state.
        num_clients: Number of clients, m.
    """

    update_class: ClassVar[type[ClientUpdate]] = ClientUpdate
    """Class of the updates that the method's clients make."""

    idle_broadcast: ClassVar[Callable[..., Broadcast] | None] = None
    """Makes an empty message, of ``client`` and ``round``, which stands for the broadcast where a client's own trained
    model is evaluated and nothing of a broadcast is used; ``None`` sends what :meth:`broadcast` gives."""

    not_checkpointed: ClassVar[tuple[str, ...]] = ()
    """Attributes that may change from round to round and need not be saved, such as a record for inspection."""

    rolls_back_client_states: ClassVar[bool] = False
    """Whether what clients have stored is undone with a round: for a server that keeps a sum over their states."""

    def __init_subclass__(cls, of: type[FederatedClient] | None = None, **options: Any) -> None:
        """Make the class the server of a method, and refuse names of attributes that nothing reads any more.

        Args:
            of: Class of the method's clients.
            options: For other bases.

        Raises:
            ConfigurationError: Says the name now.
        """
        super().__init_subclass__(**options)
        if of is not None:
            of.aggregator_class = cls
        for former in FORMER_NAMES.keys() & vars(cls).keys():
            raise ConfigurationError(f"{cls.__name__}.{former} is now called {FORMER_NAMES[former]}: rename it")

    def __init__(self, client: FederatedClient, num_clients: int) -> None:
        super().__init__()
        self.num_clients = num_clients
        self.sizes = {"C": client.num_classes, "m": num_clients}
        """Sizes that symbols of message shapes stand for: C classes, features of width d, m clients."""
        # A user's LightningModule shows its width where the method works on features.
        width = getattr(client.encoder, "out_features", None)
        if width is not None:
            self.sizes["d"] = int(width)
        self.expected_weights: dict[str, Tensor | torch.Size] = {
            n: t.to("meta") for n, t in select_state(client, client.shared_names(), clone=False).items()
        }
        """Weights in an update, each by a tensor of its shape and dtype without content, or by its shape alone: the
        client's shared state, unless a subclass says otherwise."""
        self.aggregation_weights: AggregationWeights | None = None
        """Weights of the last aggregation, for inspection; ``None`` before it, and without any."""
        self.metrics: dict[str, float] = {}
        """Values of the last aggregation that are logged with the round, by name."""
        self.seed = 0
        """The run's seed, set by the federation; see :meth:`generator`."""
        self.facts = RunFacts(num_clients)
        """Facts about the run, set by the federation: number of participating clients and planned number of rounds."""
        self._at_start: UnsavedState | None = None
        self._base_attributes = frozenset(vars(self))

    def generator(self, purpose: str, round: int) -> torch.Generator:
        """Return a CPU generator seeded by (seed, purpose, round), which draws the same after a resume.

        Args:
            purpose: Name of what is drawn, such as ``"virtual features"``; different purposes draw independently.
            round: Number of the round, from 0.
        """
        return seeded_generator(self.seed, purpose, round)

    def broadcast(self, client: int, round: int) -> Broadcast:
        """Message to the client at the start of the round (and before it is evaluated)."""
        raise NotImplementedError

    def check(self, update: ClientUpdate) -> None:
        """Refuse an update that differs from what :attr:`update_class` declares; called once, before :meth:`receive`.

        This is where updates are scanned for NaN, infinity and absurd numbers, and nowhere else.

        Raises:
            InvalidMessageError: Names the client, the round, the field, what was expected and what came.
        """
        if self._at_start is None and update.round < CHECKED_ROUNDS:  # nothing was received yet
            ignored = (*self._base_attributes, "_base_attributes", *self.not_checkpointed)
            self._at_start = UnsavedState(self, ignored, self._saved_stores())
        if type(update) is not self.update_class:
            update.refuse(
                f"{type(self).__name__} expects updates of {self.update_class.__name__}, got {type(update).__name__}; "
                f"a server of such updates sets update_class = {type(update).__name__}"
            )
        count, name = update.num_samples, f"{type(update).__name__}.weights"
        if not isinstance(count, Integral) or isinstance(count, bool) or not 1 <= count <= LARGEST:
            large = isinstance(count, int) and count.bit_length() > 64  # which Python may refuse to print
            shown = "a number of many digits" if large else repr(count)[:60]
            update.refuse(f"num_samples is {shown}, expected at least 1, at most {LARGEST:.0e}, and a whole number")
        got, expected = update.weights, self.expected_weights
        if not isinstance(got, Mapping):
            update.refuse(f"{name} is a {type(got).__name__}, expected names to tensors")
        missing, surplus = sorted(expected.keys() - got.keys()), sorted(map(str, got.keys() - expected.keys()))
        if missing or surplus:
            update.refuse(f"{name}: missing {missing}, unexpected {surplus}")
        for key, like in expected.items():
            tensor, shape = got[key], like.shape if isinstance(like, Tensor) else like
            if not isinstance(tensor, Tensor):
                update.refuse(f"{name}[{key!r}] is a {type(tensor).__name__}, expected a tensor")
            if tensor.shape != shape:
                update.refuse(f"{name}[{key!r}] has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
            if isinstance(like, Tensor) and tensor.dtype != like.dtype:
                update.refuse(f"{name}[{key!r}] has dtype {tensor.dtype}, expected {like.dtype}")
        update.check_content(
            self.sizes,
            lambda condition: bool(getattr(self, condition)),
            lambda: self.broadcast(update.client, update.round),
        )

    def receive(self, update: Any) -> None:
        """Take one client's update, an :attr:`update_class`, which :meth:`check` has passed.

        Raises:
            InvalidMessageError: A further reason to refuse the update; the server's state is as before.
        """
        raise NotImplementedError

    def aggregate(self) -> None:
        """Combine what was received since the last call; without any update nothing changes."""
        raise NotImplementedError

    def use_optimizer(self, client: FederatedClient, make: MakeOptimizer) -> None:
        """Let an optimizer take the server's steps from now on; see :class:`AveragingAggregator`.

        Args:
            client: The client as it is before the first round.
            make: Makes the optimizer from the parameters.

        Raises:
            ConfigurationError: The server does not average weights that train, or has an optimizer already.
        """
        has_one = any(getattr(self, name, None) is not None for name in ("server_optimizer", "optimizer"))
        reason = "has one of its own" if has_one else "averages no weights, or steps by a formula of its own"
        raise ConfigurationError(
            f"{type(client).__name__} does not support server_optimizer: its server {reason}. Methods whose server "
            "averages what clients share do, such as FedAvg, FedProx, SCAFFOLD, FedPer, FedRep, FedBN and Ditto "
            "(docs/methods/fedopt.md lists them)"
        )

    def takes_mean(self) -> bool:
        """Return whether the mean of a cohort's updates may replace them: it does not matter which client sent what.

        With :class:`~pfl_lightning.privacy.ClientPrivacy` the server receives such an update, and no other.
        """
        return False

    @property
    def averages_models(self) -> bool:
        """Whether updates hold models, of which the server takes the mean, and steps towards it."""
        return bool(vars(next(cls for cls in type(self).__mro__ if "aggregate" in vars(cls))).get("averages"))

    def has_client_weights(self) -> bool:
        """Return whether aggregations set :attr:`aggregation_weights`: each client gets its own combination."""
        return False

    # ------------------------------------------------------------------ checkpoints

    def client_states(self) -> Sequence[ClientStates]:
        """Every client's state on the server: saved in checkpoints, and spilled to disk as the federation says.

        By default all attributes of this type, in the order in which they were set.
        """
        return [value for value in vars(self).values() if isinstance(value, ClientStates)]

    def _saved_stores(self) -> list[ClientStates]:
        """Client states of this server and of aggregators inside it, which save their own."""
        return [
            store for module in self.modules() if isinstance(module, Aggregator) for store in module.client_states()
        ]

    # Not get_extra_state: a subclass may override that for its own content, and would lose the stores.
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        stores = self.client_states()
        if stores:
            destination[f"{prefix}{CLIENT_STATES}"] = [store.state_dict() for store in stores]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stores, saved = self.client_states(), state_dict.pop(f"{prefix}{CLIENT_STATES}", [])
        super()._load_from_state_dict(state_dict, prefix, *args)
        if len(saved) != len(stores):
            raise CheckpointError(
                f"the checkpoint holds {len(saved)} client states of the server, {type(self).__name__} has "
                f"{len(stores)}; use the version of the method that the checkpoint was made with"
            )
        for store, content in zip(stores, saved, strict=True):
            store.load_state_dict(content)

    def check_not_checkpointed(self) -> None:
        """Refuse content of Python attributes that outlasts a round, since checkpoints do not save it.

        A server with its own ``get_extra_state`` saves such content itself and is not checked.

        Raises:
            ConfigurationError: Names the attribute, and where its content belongs.
        """
        if self._at_start is None or type(self).get_extra_state is not nn.Module.get_extra_state:
            return
        name = self._at_start.first_change(self, self._saved_stores())
        if name is not None:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} changed in a round, and checkpoints do not save it: a resumed run would "
                "differ. Keep tensors by register_buffer and what belongs to clients in a ClientStates; if it belongs "
                "to one round, reset it at the end of aggregate(); if it may be lost, list it in `not_checkpointed`"
            )


class AveragingAggregator(Aggregator):
    """Mean of the clients' shared state, weighted by their numbers of samples (FedAvg, McMahan et al. 2017, Alg. 1).

    With nothing shared it receives empty updates and changes nothing.

    An optimizer may take the step from the weights x to the mean (Reddi et al., 2021, Algorithm 1), whose gradient is x
    - mean. It steps parameters that train; buffers, such as running statistics, and frozen parameters take their mean.

    Args:
        client: See :class:`Aggregator`.
        num_clients: Number of clients, m.
        by_samples: Whether a client counts by its number of samples; otherwise all count the same. ``None`` is the
            client's ``by_samples``.
        step: How far the global state goes towards the mean, see :func:`~pfl_lightning.functional.server_step`.
        optimizer: Makes the optimizer that takes the server's steps; ``None`` for none, which is SGD of rate 1.
    """

    averages: ClassVar[bool] = True
    """Whether ``aggregate`` leaves the step of ``weights`` to this class, so that an optimizer may take it. A class
    with an ``aggregate`` of its own that does says so again."""

    def __init__(
        self,
        client: FederatedClient,
        num_clients: int,
        by_samples: bool | None = None,
        step: float = 1.0,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(client, num_clients)
        check_number("step (of the server)", step)
        self.by_samples, self.step = client.by_samples if by_samples is None else by_samples, step
        self.parameter_names = frozenset(name for name, _ in client.named_parameters(remove_duplicate=False))
        self.weights = TensorDict(select_state(client, client.shared_names()))
        self.running_average = RunningAverage()
        """Mean of what was received since the last :meth:`aggregate`."""
        self.server_optimizer: Learner | None = None
        if optimizer is not None:
            self.use_optimizer(client, optimizer)

    def use_optimizer(self, client: FederatedClient, make: MakeOptimizer) -> None:
        """Let an optimizer take the steps towards the mean, from now on."""
        state = self.weights.as_state()
        trained = [n for n, p in client.named_parameters(remove_duplicate=False) if p.requires_grad and n in state]
        if not self.averages_models or not trained or self.server_optimizer is not None:
            super().use_optimizer(client, make)
        if not callable(make) or (inspect.isclass(make) and not issubclass(make, torch.optim.Optimizer)):
            raise ConfigurationError(
                "server_optimizer must make an optimizer from parameters, such as "
                f"pfl_lightning.server_optimizers.FedAdam or partial(torch.optim.SGD, lr=1.0), got {make!r}"
            )
        single = [state[n].to(torch.promote_types(state[n].dtype, torch.float32), copy=True) for n in trained]
        self.server_optimizer, self.stepped_names = Learner(nn.ParameterList(single), make), trained

    def takes_mean(self) -> bool:
        """Return whether updates are averaged as this class does, and the mean is where the server steps."""
        return type(self).receive is AveragingAggregator.receive and self.averages_models

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The global state, the same for every client."""
        return Broadcast(client=client, round=round, weights=self.weights.as_state())

    @whole_or_not
    def receive(self, update: Any) -> None:
        """Add one client's state to the running average."""
        if update.weights:
            self.running_average.update(update.weights, update.num_samples if self.by_samples else 1)

    def aggregate(self) -> None:
        """Take the mean, w = sum_k n_k / n w_k, or go a step towards it."""
        average, self.running_average = self.running_average, RunningAverage()
        if average.total_weight > 0:
            sent, found = self.weights.as_state(), average.result()
            if self.step != 1:
                found = server_step(sent, found, self.step, self.parameter_names)
            if self.server_optimizer is not None:
                weights = dict(zip(self.stepped_names, self.server_optimizer.network.parameters(), strict=True))
                self.server_optimizer.step_along([sent[n].to(w) - found[n].to(w) for n, w in weights.items()])
                found = {**found, **{n: w.detach().to(sent[n], copy=True) for n, w in weights.items()}}
            self.weights.assign(found)


def no_broadcast(server: Aggregator, found: object) -> ConfigurationError:
    """The error of a server whose :meth:`Aggregator.broadcast` returned something else."""
    return ConfigurationError(
        f"{type(server).__name__}.broadcast returned {type(found).__name__}, expected a Broadcast: return "
        "Broadcast(client=client, round=round, weights={...}), or a subclass with further fields"
    )
