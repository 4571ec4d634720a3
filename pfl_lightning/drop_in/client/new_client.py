"""Clients of a method whose model is a user's LightningModule."""

from __future__ import annotations

import inspect
from typing import Any, cast

from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.client.user_module import UserModule

__all__ = ["new_client"]

MODULES_OWN = {"head_lr": None, "head_relu": False}
"""Options of methods that are left to the module: its head's rate unless one is given, and its layers as they are."""


def new_client(
    method: type[FederatedClient], model: UserModule, num_classes: int, settings: dict[str, Any]
) -> FederatedClient:
    """A client of a method, whose model is a user's.

    Args:
        method: Class of the client.
        model: The model.
        num_classes: Number of classes, C; 0 where there are none.
        settings: Hyper-parameters of the method.
    """
    kinds = [kind for kind in method.__mro__ if issubclass(kind, FederatedClient) and "__init__" in vars(kind)]
    named = [inspect.signature(kind.__init__).parameters for kind in kinds]
    own: dict[str, Any] = {} if any("epochs" in names for names in named[:-1]) else {"epochs": 1}
    if method.feature_based:
        own |= {name: value for name, value in MODULES_OWN.items() if name in named[0]}
    client: Any = method.__new__(method)
    vars(client)["user_module"], model.client = model, client  # __init__ asks for it: the module is no encoder
    client.__init__(model.module, num_classes, **{**own, **settings})
    model.find_uninitialized_copies()
    return cast(FederatedClient, client)
