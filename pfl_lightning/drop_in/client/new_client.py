"""Clients of a method whose model is a user's LightningModule, and options that they do not have."""

from __future__ import annotations

import inspect
from typing import Any, cast

from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.client.user_module import UserModule
from pfl_lightning.errors import ConfigurationError

__all__ = ["check_method", "new_client"]

TRAINING = {"lr", "momentum", "weight_decay", "optimizer", "lr_scheduler", "schedule"}
"""Options of clients that make their optimizers themselves."""

MODULES_OWN = {"head_lr": None, "head_relu": False}
"""Options of methods that are left to the module: its head's rate unless one is given, and its layers as they are."""


def check_method(method: type[FederatedClient]) -> None:
    """Refuse a method that needs an encoder of its own.

    Raises:
        ConfigurationError: Says how layers of the module are one.
    """
    if not (method.model_agnostic or method.feature_based):
        raise ConfigurationError(
            f"{method.__name__} trains an encoder by steps of its own, which a user's LightningModule does not take. "
            f"Train its layers that give one vector for each sample: Federation({method.__name__}, encoder=lambda "
            "shape: Net().backbone), with their width as backbone.out_features, on data of images such as "
            "FromLightning (docs/drop_in.md has an example). Or use a method that needs the module's training step, or "
            "its features, alone (`pfl methods` has a list), or your own with model_agnostic = True or feature_based = "
            "True"
        )


def new_client(
    method: type[FederatedClient], model: UserModule, num_classes: int, settings: dict[str, Any]
) -> FederatedClient:
    """A client of a method, whose model is a user's.

    Args:
        method: Class of the client.
        model: The model.
        num_classes: Number of classes, C; 0 where there are none.
        settings: Hyper-parameters of the method.

    Raises:
        ConfigurationError: One of them is none of the method's, or is left to the module.
    """
    kinds = [kind for kind in method.__mro__ if issubclass(kind, FederatedClient) and "__init__" in vars(kind)]
    named = [inspect.signature(kind.__init__).parameters for kind in kinds]
    _refuse(method, settings, set[str]().union(*named))
    own: dict[str, Any] = {} if any("epochs" in names for names in named[:-1]) else {"epochs": 1}
    if method.feature_based:
        own |= {name: value for name, value in MODULES_OWN.items() if name in named[0]}
    client: Any = method.__new__(method)
    vars(client)["user_module"], model.client = model, client  # by which __init__ takes the module for no encoder
    client.__init__(model.module, num_classes, **{**own, **settings})
    model.find_uninitialized_copies()
    return cast(FederatedClient, client)


def _refuse(method: type[FederatedClient], settings: dict[str, Any], known: set[str]) -> None:
    training = sorted(settings.keys() & TRAINING)
    if training:
        raise ConfigurationError(
            f"{', '.join(training)}: not for a user's LightningModule, whose configure_optimizers says how it is "
            "trained (federate and FederatedLoop have an option schedule of their own)"
        )
    if settings.get("head_relu"):
        raise ConfigurationError(
            "head_relu: the layers of a user's LightningModule stay as they are; features= names the layer whose "
            "output are the features, such as the one before a ReLU"
        )
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigurationError(f"{method.__name__} has no option {', '.join(unknown)}")
