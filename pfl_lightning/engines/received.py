"""A client begins its fit with nothing of another client's: a check of the first fit of each module."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import lightning as L
import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.unsaved import UnsavedState

__all__ = ["attributes", "check_attributes", "check_names", "check_set", "mark_shared"]

_log = logging.getLogger(__name__)

_SET_BY_ENGINES = frozenset(vars(L.LightningModule())) | {
    "carried",
    "frozen_before",
    "logged_metrics",
    "logged_reductions",
    "phase",
    "shown_metrics",
    "_recorder",
}


@torch.no_grad()
def mark_shared(client: FederatedClient) -> list[str]:
    """Overwrite what is shared with NaN, so that :func:`check_set` finds what nothing has set.

    Args:
        client: The module, before its first fit.

    Returns:
        The names.
    """
    state = client.state_dict()  # shares storage with the module
    names = [name for name in client.shared_names() if state[name].is_floating_point() and state[name].numel()]
    for name in names:
        state[name].fill_(torch.nan)
    return names


def check_set(client: FederatedClient, marked: Sequence[str]) -> None:
    """Refuse a fit in which neither the personal state, nor the message, nor the method sets all that is shared.

    One module serves all clients of an architecture: what nothing sets would be what the client before has trained.

    Args:
        client: The module before its first phase.
        marked: What :func:`mark_shared` returned.

    Raises:
        ConfigurationError: Names what nothing sets.
    """
    state = client.state_dict()
    unset = [name for name in marked if bool(state[name].isnan().all())]
    if unset:
        raise ConfigurationError(
            f"{unset[0]} is shared, and nothing sets it before a local fit ({len(unset)} of {len(marked)} such names): "
            "the client would go on from what another client has trained. Send it in the weights of the server's "
            f"message, set it in {type(client).__name__}.receive or before_fit, or leave it out of `shared`"
        )


def check_names(client: FederatedClient, before: Iterable[str]) -> None:
    """Refuse what a fit adds, and what would go on in the next client's: parameters, and buffers of a method.

    Args:
        client: The module after the fit.
        before: Names of its parameters and persistent buffers before.

    Raises:
        ConfigurationError: Names what was added.
    """
    if client.step_module is not client:  # a project's module may add buffers, which are taken away again
        added = {name for name, _ in client.named_parameters()} - set(before)
        if added:
            name, module = min(added).removeprefix("module."), type(client.step_module).__name__
            raise ConfigurationError(
                f"{module} has {name} after its first local fit and did not have it before: it is stored for no "
                "client. Make it in __init__, setup or configure_model, which are called before the clients begin"
            )
        return
    added = set(client.state_dict()) - set(before)
    if added:
        raise ConfigurationError(
            f"{type(client).__name__} has {min(added)} after its first local fit and did not have it before: it "
            "is stored for no client, and the next client would go on with it. Make it in __init__, with its shape"
        )


def attributes(client: FederatedClient) -> UnsavedState | None:
    """Python attributes of a method's module; ``None`` for a project's, whose attributes are set back for each client.

    Args:
        client: The module before its first fit.
    """
    return UnsavedState(client, _SET_BY_ENGINES, buffers=False) if client.step_module is client else None


def check_attributes(client: FederatedClient, before: UnsavedState | None) -> None:
    """Warn of a Python attribute that a method changes in a fit, and that the next client's fit would begin with.

    Args:
        client: The module after its first fit.
        before: What :func:`attributes` returned.
    """
    name = None if before is None else before.first_change(client)
    if name is not None:
        _log.warning(
            "%s.%s was changed by the first local fit. One module serves all clients of an architecture, so the next "
            "client's fit begins with the changed value, and results depend on the order of clients and on the engine. "
            "Use register_buffer in __init__ for what a client carries from fit to fit, and a non-persistent buffer or "
            "what before_fit returns for what only one fit needs",
            type(client).__name__,
            name,
        )
