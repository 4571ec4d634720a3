"""Copies of a user's module, also where ``copy.deepcopy`` does not take it; what is frozen, which copies share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial, update_wrapper
from types import CodeType, MethodType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from pfl_lightning.datamodules.adapters.stages import data_in
from pfl_lightning.engines.lifecycle import trains
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import made_lightning, written_class
from pfl_lightning.state.closures import bind_functions
from pfl_lightning.state.equality import same
from pfl_lightning.state.tensors import tensors_in

Factory = Callable[[], L.LightningModule]


def copied(
    module: L.LightningModule, factory: Factory | None = None, shared: Collection[str] = ()
) -> L.LightningModule:
    """A copy of lightning's package that is not compiled: a compiled call would use the original's weights.

    Args:
        module: The module.
        factory: Makes the module once more, with any weights; ``None`` copies all of its attributes.
        shared: Names of parameters whose memory the copy shares, since they never change.

    Raises:
        ConfigurationError: It cannot be copied, or the factory makes something else.
    """
    if factory is None:
        try:
            other = copy.deepcopy(module, held_tensors(module) | shared_memory(module, shared))
        except Exception as error:
            name = type(module).__name__
            raise ConfigurationError(
                f"clients train copies of {name}, but it cannot be copied: {type(error).__name__}: {error}. Make what "
                "cannot be copied (a lock, an open file) in on_fit_start, or pass federate(..., module_factory=...) a "
                f"function that makes the module, such as lambda: {name}(...); its weights are then replaced"
            ) from error
        bind_functions(module, other)
        make_leaves(other)
    else:
        other = _made_again(module, factory, shared)
    take_cli_optimizers(module, other)
    made_lightning(other)
    for layer in other.modules():
        layer._compiled_call_impl = None
    return other


def make_leaves(copied: nn.Module) -> None:
    """Make parameters of a copied TorchScript layer ones that train: torch copies them as results of a computation."""
    for parameter in copied.parameters():
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_()


def held_tensors(module: nn.Module) -> dict[int, Any]:
    """Copies of results of computations that a module or a layer holds on to, without gradient, as a memo of deepcopy.

    Such are the weights of ``torch.nn.utils.weight_norm`` and images that a step keeps; deepcopy refuses them. Data
    sets and loaders that a module brings stand for themselves: all copies share them.
    """
    values = (value for layer in module.modules() for value in vars(layer).values())
    every = list(values)
    found = {id(tensor): tensor for tensor in tensors_in(every) if not tensor.is_leaf}
    data = {id(one): one for value in every for one in data_in(value)}
    return {number: tensor.detach().clone() for number, tensor in found.items()} | data


def _made_again(module: L.LightningModule, factory: Factory, shared: Collection[str]) -> L.LightningModule:
    with isolate_rng():
        other = factory()
    name = written_class(module).__name__
    if type(other) is not written_class(module) or other is module:
        what = "the same object" if other is module else type(other).__name__
        raise ConfigurationError(f"module_factory must make a new {name} at every call, it made {what}")
    given, made = ([*each.named_parameters(), *each.named_buffers()] for each in (module, other))
    if [(n, t.shape) for n, t in given] != [(n, t.shape) for n, t in made]:
        raise ConfigurationError(
            f"module_factory makes a {name} with other names or shapes of parameters or buffers than the module given: "
            "call it with the same arguments"
        )
    with torch.no_grad():
        for (own, value), (_, new) in zip(given, made, strict=True):
            new.data = value.detach() if own in shared else value.detach().clone()  # also its dtype and device
            new.requires_grad_(value.requires_grad)
    for one, layer in zip(module.modules(), other.modules(), strict=True):
        layer.training = one.training
    return other


# ---------------------------------------------------------------------- optimizers of a command line


class _Configure(partial[Any]):
    """A partial of which Lightning sees that it is not its own method, also where a function wraps it."""

    @property
    def __code__(self) -> CodeType:
        return self.func.__code__  # type: ignore[attr-defined]


def take_cli_optimizers(given: L.LightningModule, other: L.LightningModule) -> None:
    """Let a copy have optimizers of its own where a LightningCLI has given the module some, which step the module."""
    made = getattr(vars(given).get("configure_optimizers"), "__func__", None)
    if not isinstance(made, partial) or not any(isinstance(v, torch.optim.Optimizer) for v in made.keywords.values()):
        return
    memo: dict[int, Any] = {}
    places: dict[str, nn.Parameter] = {}
    for name, parameter in given.named_parameters():
        place = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        places[name] = memo[id(parameter)] = place
    options = copy.deepcopy(dict(made.keywords), memo)
    configure = _Configure(_configured, made=made.func, options=options, places=places)
    vars(other)["configure_optimizers"] = MethodType(update_wrapper(configure, made.func), other)


def _configured(
    module: L.LightningModule, *, made: Callable[..., Any], options: dict[str, Any], places: dict[str, nn.Parameter]
) -> Any:
    """What the LightningCLI's function returns, with a new optimizer and scheduler of the module's own parameters."""
    own = dict(module.named_parameters())
    options = copy.deepcopy(options, {id(place): own[name] for name, place in places.items()})
    for value in options.values():
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            _count_steps(value.optimizer)
    return made(module, **options)


def _count_steps(optimizer: Any) -> None:
    """What a scheduler does to its optimizer's ``step``, which a copy of the optimizer loses."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step


# ---------------------------------------------------------------------- what is frozen

UNUSED = "original_module"
"""Where peft keeps a layer of which it trains a copy; the layer itself stays as it is."""


def frozen_parameters(module: nn.Module, patterns: Sequence[str] | None = None) -> frozenset[str]:
    """Names of a module's frozen parameters, which are one for all clients.

    Args:
        module: The module.
        patterns: Which of the parameters with ``requires_grad=False``; ``None`` for all but those of a network that
            may follow another one (:func:`chosen_names`).
    """
    found = [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]
    return chosen_names(module, found, patterns)


def chosen_names(module: nn.Module, found: Collection[str], patterns: Sequence[str] | None) -> frozenset[str]:
    """Those names of frozen parameters and buffers that patterns name.

    Without patterns these are all but those of a *follower*: a frozen network of the form of one that trains, such as
    the teacher of BYOL, MoCo or DINO, which is a moving average of its student. It changes in local fits, though not by
    a gradient, and is treated as what trains is.

    Args:
        module: The module.
        found: Names of what is frozen.
        patterns: Names or patterns of layers or parameters; ``None`` for the rule above.

    Raises:
        ConfigurationError: A pattern fits nothing that is frozen.
    """
    if patterns is None:
        moving = tuple(f"{name}." for name in followers(module)) if found else ()
        return frozenset(name for name in found if not name.startswith(moving))
    fitting = {p: {n for n in found if fnmatchcase(n, p) or fnmatchcase(n, f"{p}.*")} for p in patterns}
    for pattern, names in fitting.items():
        if not names and found:
            raise ConfigurationError(
                f"frozen={pattern!r} matches no parameter with requires_grad=False of {type(module).__name__}; there "
                f"are {list(found)}"
            )
    return frozenset[str]().union(*fitting.values())


def shared_memory(module: nn.Module, names: Collection[str]) -> dict[int, Any]:
    """Parameters over the memory of a module's own, as a memo of ``copy.deepcopy``.

    Args:
        module: The module that is copied.
        names: Which of its parameters the copy shares; of a class of their own (quantized ones) none.
    """
    found = module.named_parameters(remove_duplicate=False) if names else ()
    return {id(p): nn.Parameter(p.detach(), False) for name, p in found if name in names and type(p) is nn.Parameter}


def followers(module: nn.Module) -> list[str]:
    """Names of frozen networks that have the layers and shapes of one that trains, and so may be its moving average."""
    trained = {name: layer for name, layer in module.named_modules() if name and trains(layer)}
    forms: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in trained.items():
        forms.setdefault(_form(layer), []).append(name)

    def follows(name: str, layer: nn.Module) -> bool:
        last = name.rpartition(".")[2]
        like = [other for other in forms.get(_form(layer), ()) if not _in_a_row(name, other)]
        if last != UNUSED and any(_may_follow(layer, trained[other]) for other in like):
            return True
        parts = [(part, child) for part, child in layer.named_children() if list(child.parameters())]
        alone = not list(layer.parameters(recurse=False))
        return alone and bool(parts) and all(follows(f"{name}.{part}", child) for part, child in parts)

    found, inside = list[str](), list[str]()
    for name, layer in module.named_modules():
        if name and name not in trained and not name.startswith(tuple(inside)) and list(layer.parameters()):
            inside.append(f"{name}.")  # the largest ones
            found += [name] if follows(name, layer) else []
    return found


def _form(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _in_a_row(one: str, other: str) -> bool:
    """Whether two layers are numbered parts of one: of a stack of equal layers the first ones are often frozen."""
    (first, _, number), (second, _, index) = one.rpartition("."), other.rpartition(".")
    return first == second and number.isdecimal() and index.isdecimal()


def _may_follow(frozen: nn.Module, trained: nn.Module) -> bool:
    """Whether a frozen network may be the average of one of its form; a single layer only if it has its values, too."""
    layers = [layer for layer in frozen.modules() if list(layer.parameters(recurse=False))]
    return len(layers) > 1 or all(
        same(own, other) for own, other in zip(frozen.parameters(), trained.parameters(), strict=True)
    )
