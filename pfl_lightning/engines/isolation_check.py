"""Checks once that a fit starts from its own client's state: one module serves all clients of an architecture."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.equality import same
from pfl_lightning.state.image import UnsavedState

_log = logging.getLogger(__name__)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which a module keeps what is called around its passes."""

SAMPLES = 8
"""Values of each frozen tensor that are looked at: an optimizer's step, or a moving average, changes nearly all."""

SET_BY_ENGINES = frozenset(vars(L.LightningModule())) | {
    "isolation",
    "logged_metrics",
    "logged_reductions",
    "loss_scale",
    "phase",
    "progress_bar_names",
    "_recorder",
}
"""Attributes of a client that engines or Lightning set."""


class IsolationCheck:
    """State of a client's module before its first fit, and checks of what its fits must leave as it was.

    The module has it as ``isolation``; a copy of the module begins without.
    """

    def __init__(self) -> None:
        self.begun = False
        self._names: Iterable[str] = ()  # of parameters and persistent buffers
        self.marked: list[str] = []
        """Names of what is shared, where nothing has set it yet."""
        self._attributes: UnsavedState | None = None
        self._hooks: dict[tuple[str, str], set[int]] = {}
        self._frozen: dict[str, Tensor] = {}
        self.matched: dict[tuple[Any, ...], Iterable[str]] = {}
        """Names that patterns fit: matching takes longer than a step of a small model, and names do not change."""
        self.steady = set[tuple[Any, ...]]()
        """Phases and modes in which the encoder has given what it gives in evaluation."""
        self.buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        """Non-persistent buffers of each module as they were before an evaluation was prepared."""

    @classmethod
    def of(cls, client: FederatedClient) -> IsolationCheck:
        """Check of a client's module, made when it is first asked for."""
        if client.isolation is None:
            client.isolation = cls()
        found: IsolationCheck = client.isolation
        return found

    def __reduce__(self) -> Any:
        return type(None), ()

    # ------------------------------------------------------------------ before a fit

    @torch.no_grad()
    def begin(self, client: FederatedClient) -> None:
        """Note what the module holds before its first fit, and overwrite what is shared with NaN."""
        self.begun, state = True, client.state_dict()  # shares storage with the module
        self._names, self._hooks = tuple(state), {place: set(held) for place, held in _hooks_of(client).items()}
        self.marked = [n for n in client.shared_names() if state[n].is_floating_point() and state[n].numel()]
        for name in self.marked:
            state[name].fill_(torch.nan)
        if client.step_module is client:  # attributes of a project's module are set back for each client
            self._attributes = UnsavedState(client, SET_BY_ENGINES, buffers=False)

    def sample_frozen(self, client: FederatedClient) -> None:
        """Note a few values of what is frozen, as a fit begins."""
        self._frozen = _samples(client)

    def check_set(self, client: FederatedClient) -> None:
        """Refuse a first fit in which neither the personal state, nor the message, nor the method sets what is shared.

        Raises:
            ConfigurationError: Names what nothing sets, which would be what the client before has trained.
        """
        marked, self.marked = self.marked, []
        state = client.state_dict() if marked else {}
        unset = [name for name in marked if bool(state[name].isnan().all())]
        if unset:
            raise ConfigurationError(
                f"{unset[0]} is shared, and nothing sets it before a local fit ({len(unset)} of {len(marked)} such "
                "names): the client would begin with what another client has trained. Send it in the weights of the "
                f"server's message, set it in {type(client).__name__}.receive or before_fit, or leave it out of "
                "`shared`"
            )

    # ------------------------------------------------------------------ after a fit

    def check_frozen(self, client: FederatedClient, context: FitContext) -> None:
        """Compare what is frozen with the values that were noted when the fit began.

        Raises:
            ConfigurationError: It has changed: one client's values would be the next one's.
        """
        before, self._frozen = self._frozen, {}
        now = _samples(client) if before else {}
        name = next((n for n, few in before.items() if n not in now or not same(few, now[n], nan=True)), None)
        if name is not None:
            raise ConfigurationError(
                f"the local fit of {context.who} in round {context.round + 1} changed {name}, which was "
                "frozen (requires_grad=False) when the federation was set up and is one for all clients. Make the "
                "module again and let it train from the start, or let frozen parameters travel like others: "
                "federate(..., frozen=())"
            )

    def check_added(self, client: FederatedClient) -> None:
        """Refuse parameters, and buffers of a method, that a fit adds; warn of attributes that a method changes.

        Raises:
            ConfigurationError: Names what was added, with which the next client's fit would go on.
        """
        before, self._attributes = self._attributes, None
        own = client.step_module is client  # a project's module may add buffers, which are taken away again
        names = client.state_dict() if own else dict(client.named_parameters())
        added, name = names.keys() - set(self._names), type(client.step_module).__name__
        if added and self.begun:
            what = min(added) if own else min(added).removeprefix("module.")
            where = "__init__, with its shape" if own else "__init__, setup or configure_model, before clients begin"
            raise ConfigurationError(
                f"{name} has {what} after its first local fit and did not have it before: it is stored for no client, "
                f"and the next client would begin with it. Make it in {where}"
            )
        changed = None if before is None else before.first_change(client)
        if changed is not None:
            _log.warning(
                "%s.%s was changed by the first local fit. One module serves all clients of an architecture, so the "
                "next client's fit begins with the changed value, and results depend on the order of clients and on "
                "the engine. Use register_buffer in __init__ for what a client carries from fit to fit, and a "
                "non-persistent buffer or what before_fit returns for what only one fit needs",
                name,
                changed,
            )

    def remove_hooks(self, client: FederatedClient) -> None:
        """Remove what a failed fit has left to be called around passes."""
        for place, held in _hooks_of(client).items():
            for key in held.keys() - self._hooks.get(place, set()):
                del held[key]


def _hooks_of(module: nn.Module) -> dict[tuple[str, str], dict[int, Any]]:
    """Hooks around the passes of a module and its layers, by layer and kind."""
    return {(layer, kind): vars(own)[kind] for layer, own in module.named_modules() for kind in HOOKS}


@torch.no_grad()
def _samples(client: FederatedClient) -> dict[str, Tensor]:
    """A few values of each frozen tensor, spread evenly over it."""
    named = (*client.named_parameters(), *client.named_buffers())
    return {name: _few(tensor).clone().cpu() for name, tensor in named if name in client.frozen and tensor.numel()}


def _few(tensor: Tensor) -> Tensor:
    count = min(SAMPLES, tensor.numel())
    if tensor.is_contiguous():
        return tensor.detach().as_strided((count,), (tensor.numel() // count,))
    return tensor.detach()[0].flatten()[:count]
