"""What of a Lightning project cannot be federated, said before anything is trained."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection
from functools import partial
from typing import Any, cast

import lightning as L
from torch import nn
from torch.nn.parameter import is_lazy

from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules.adapters.stages import brings
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.older_package import is_older

OF_MODULE = {"lr", "momentum", "weight_decay", "optimizer", "lr_scheduler", "schedule", "head_relu"}
"""Options of clients that make their layers and optimizers themselves."""


def check_labels(labels: Any) -> None:
    """Refuse anything but a function.

    Raises:
        ConfigurationError: It is none, such as the key of an item's class.
    """
    if labels is not None and not callable(labels):
        raise ConfigurationError(
            f"labels must be a function that returns the class of an item, got {labels!r}: pass a function, such as "
            f"lambda item: item[{labels if isinstance(labels, str | int) else 'label'!r}]"
        )


def check_module(module: Any) -> L.LightningModule:
    """The module itself, where it was compiled.

    Raises:
        ConfigurationError: It is none, has no training step, parameters without a shape, or names with a slash.
    """
    original = getattr(module, "_orig_mod", module)
    if isinstance(original, L.LightningModule) or is_older(original):
        if original is not module or original._compiled_call_impl is not None:
            warnings.warn(
                f"{type(original).__name__} is compiled; clients train the module as it was before, not compiled. "
                "Wrap layers of it in torch.compile in its __init__ instead",
                stacklevel=3,
            )
        module = original
    known = isinstance(module, L.LightningModule) or (isinstance(module, nn.Module) and is_older(module))
    if not known or isinstance(module, FederatedClient | Federation):
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ConfigurationError(
            f"expected a LightningModule of lightning or pytorch_lightning that is not yet a federation, got {name}"
        )
    if not brings(module, "training_step"):
        raise ConfigurationError(f"{type(module).__name__} has no training_step")
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigurationError(
            f"{lazy[0]} of {type(module).__name__} has no shape yet (a lazy layer): pass a batch through the module "
            "first"
        )
    slashes = [name for name in plain_state(module) if "/" in name]
    if slashes:
        raise ConfigurationError(f"the name {slashes[0]!r} in {type(module).__name__} has a slash: rename it")
    return cast(L.LightningModule, module)


def split_method(method: Any) -> tuple[type[FederatedClient], dict[str, Any]]:
    """A method's class and its hyper-parameters.

    Raises:
        ConfigurationError: It is neither a class of a method nor a partial of one.
    """
    made: Any = method
    settings: dict[str, Any] = {}
    while isinstance(made, partial):
        if made.args:
            raise ConfigurationError(f"give the hyper-parameters of {method!r} by name")
        settings = {**made.keywords, **settings}
        made = made.func
    if not (inspect.isclass(made) and issubclass(made, FederatedClient)):
        raise ConfigurationError(f"method must be a class of pfl_lightning.methods or a partial of one, got {method!r}")
    return made, settings


def check_method(method: type[FederatedClient], settings: Collection[str]) -> None:
    """Refuse a method that needs an encoder of its own, and options that are the module's affair.

    Args:
        method: Class of the client.
        settings: Names of the hyper-parameters that are given.

    Raises:
        ConfigurationError: Says how layers of the module are an encoder, or where the option is set.
    """
    if not (method.model_agnostic or method.feature_based):
        raise ConfigurationError(
            f"{method.__name__} trains an encoder by its own steps, not by a LightningModule's. Use a method that "
            "takes any module, such as FedAvg, FedProx, FedPer or Ditto (docs/drop_in.md#which-method). Or give it the "
            f"layers that compute features: Federation({method.__name__}, encoder=lambda shape: Net().backbone), with "
            "their width as backbone.out_features, on images such as FromLightning's. A method of your own sets "
            "model_agnostic or feature_based = True"
        )
    own = ", ".join(sorted({*settings} & OF_MODULE))
    if own:
        raise ConfigurationError(
            f"{own}: not for a LightningModule. Its configure_optimizers sets rates, optimizers and schedulers, and "
            "its layers are not changed: set it there and leave it out here (schedule= of federate and FederatedLoop "
            "says how schedulers continue; features= may name a layer before a ReLU)"
        )
