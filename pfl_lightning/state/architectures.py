"""Architectures of a federation: a client module for each encoder, checked and summarized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.encoders import EncoderAssignment, EncoderFactory, RoundRobin, build_encoder, encoder_label
from pfl_lightning.errors import ConfigurationError, is_out_of_memory
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.closures import copy_module

__all__ = [
    "ArchitectureSummary",
    "EncoderChoice",
    "MethodFactory",
    "as_assignment",
    "build_clients",
    "check_features",
    "check_shared",
    "summarize_architectures",
]

MethodFactory = Callable[[nn.Module, int], FederatedClient]
# In this order: a parser of configs takes the first that fits, and writes back what it took.
EncoderChoice = str | list[str | EncoderFactory] | EncoderAssignment | EncoderFactory


@dataclass(frozen=True)
class ArchitectureSummary:
    """Summary of one of the federation's architectures.

    Attributes:
        encoder: Name of its encoder.
        features: Width of its features, d; ``None`` for a user-defined LightningModule.
        parameters: Number of parameters of the client's whole model.
        shared: Number of entries (of parameters and buffers) exchanged in each direction as weights.
        clients: Number of clients that have it.
    """

    encoder: str
    features: int | None
    parameters: int
    shared: int
    clients: int


def as_assignment(choice: EncoderChoice) -> EncoderAssignment:
    """Assignment of encoders: one encoder for all, a list in turn (round-robin), or an assignment unchanged."""
    if isinstance(choice, EncoderAssignment):
        return choice
    if not isinstance(choice, str | list | tuple) and not callable(choice):
        raise ConfigurationError(
            f"encoder must be a name, such as 'mlp', a module, what makes one from the shape of a sample, or a list of "
            f"these; got {choice!r}"
        )
    return RoundRobin(list(choice) if isinstance(choice, list | tuple) else [choice])


def build_clients(
    assignment: EncoderAssignment, make_client: MethodFactory, data: FederatedData, seed: int
) -> list[FederatedClient]:
    """Client modules, one for each encoder; the first draws the same weights as if it were the only one.

    Raises:
        ConfigurationError: An encoder has no ``out_features``, returns something else than features of that width, or
            cannot be combined with the others under this method.
    """
    clients, input_shape = [], data.input_shape
    for index, make in enumerate(assignment.encoders):
        with torch_seed(derive_seed(seed, Purpose.INITIAL_WEIGHTS, *([index] if index else []))):
            clients.append(make_client(_encoder_of(make, input_shape), data.num_classes))
        if clients[-1].further_encoders and not isinstance(make, nn.Module):
            clients[-1].take_encoders(_further(make, input_shape, clients[-1].further_encoders, seed, index))
    samples = next(data.client_data(0).train.split(2)).loader(2).tensors()[0]
    for client, label in zip(clients, assignment.labels, strict=True):
        check_features(label, client.encoder, samples)
        if client.partner_encoder is not None:
            _build_partner(client, client.partner_encoder, samples, seed)
    check_shared(clients, assignment.labels)
    return clients


def _further(
    make: str | EncoderFactory, input_shape: tuple[int, ...], count: int, seed: int, index: int
) -> list[nn.Module]:
    """Further encoders of an architecture, each with a draw of its own."""
    found = []
    for number in range(1, count + 1):
        with torch_seed(derive_seed(seed, Purpose.FURTHER_WEIGHTS, index, number)):
            found.append(_encoder_of(make, input_shape))
    return found


def _build_partner(client: FederatedClient, make: str | EncoderFactory, samples: Tensor, seed: int) -> None:
    """Give a client its second network, with the same first weights beside every architecture."""
    label = f"of the partner ({encoder_label(make)})"
    with torch_seed(derive_seed(seed, Purpose.PARTNER_WEIGHTS)):
        encoder = _encoder_of(make, tuple(samples.shape[1:]), label)
        client.attach_partner(encoder)
    check_features(label, encoder, samples)


def _encoder_of(make: str | EncoderFactory, input_shape: tuple[int, ...], label: str = "") -> nn.Module:
    """An encoder that says how wide its features are; ``label`` is its name in errors, by default that of its class."""
    encoder = _build_encoder(make, input_shape, label or encoder_label(make))
    if not isinstance(getattr(encoder, "out_features", None), int):
        raise ConfigurationError(
            f"the encoder {label or type(encoder).__name__} has no integer attribute out_features (the width of its "
            "features): set it where the network is made (network.out_features = 64, say), or take an encoder of the "
            "package by its name"
        )
    return encoder


def _build_encoder(make: str | EncoderFactory, input_shape: tuple[int, ...], label: str) -> nn.Module:
    try:
        if isinstance(make, nn.Module):
            return _copy_of(make, input_shape)
        return build_encoder(make, input_shape) if isinstance(make, str) else make(input_shape)
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise ConfigurationError(
                f"the encoder {label} for inputs of shape {input_shape} does not fit into memory: make its layers "
                f"smaller, or the inputs ({str(error).splitlines()[0] if str(error) else 'out of memory'})"
            ) from error
        if isinstance(error, ValueError) and not label.startswith("of the partner"):
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(str(error)) from error  # it says what is wrong with the encoder
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # torch adds its stack
        raise ConfigurationError(
            f"the encoder {label} could not be made for inputs of shape {input_shape}: {reason}; an "
            "encoder is a class or function that takes input_shape and gives a module with out_features"
        ) from error


def _copy_of(encoder: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """A copy that begins with the module's weights, with the width of its features where it does not say it."""
    copied = copy_module(encoder)
    if not isinstance(getattr(copied, "out_features", None), int):
        with torch.no_grad():
            features = copy_module(encoder).eval()(torch.zeros(1, *input_shape))
        if isinstance(features, Tensor) and features.ndim == 2:
            copied.out_features = features.shape[1]  # type: ignore[assignment]
    return copied


@torch.no_grad()
def check_features(label: str, encoder: nn.Module, samples: Tensor) -> None:
    """Try an encoder on a few samples (N, ...).

    Raises:
        ConfigurationError: It fails on them, or does not return features of shape (N, out_features).
    """
    modes = {module: module.training for module in encoder.modules()}
    try:
        with torch_seed(0):
            found = encoder.eval()(samples)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _failed_on(label, encoder, samples, error) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    expected = (len(samples), width_of(encoder))
    if not isinstance(found, Tensor) or tuple(found.shape) != expected:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigurationError(
            f"the encoder {label} must map inputs of shape {tuple(samples.shape)} to features of shape {expected} "
            f"(out_features is {expected[1]}), it gives {got}"
        )


def _failed_on(label: str, encoder: nn.Module, samples: Tensor, error: Exception) -> ConfigurationError:
    """Error about an encoder that fails on samples: the reason, or that its numbers are of another type."""
    others = {p.dtype for p in encoder.parameters() if p.is_floating_point()} - {samples.dtype}
    if others and (samples.is_floating_point() or "type" in str(error)):
        return ConfigurationError(
            f"the encoder {label} has parameters of {others.pop()}, and inputs are {samples.dtype}: give both as "
            "float32 (encoder.float(); .float() in the Dataset, or in the data module's load), and choose the "
            "precision by the Trainer (Trainer(precision='64-true'), 'bf16-mixed', ...); an encoder of indices begins "
            "with nn.Embedding"
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]  # torch adds its stack
    return ConfigurationError(f"the encoder {label} fails on inputs of shape {tuple(samples.shape)}: {reason}")


def check_shared(clients: Sequence[FederatedClient], labels: Sequence[str]) -> None:
    """Check that the shared part is the same for all architectures.

    Raises:
        ConfigurationError: The shared part differs; the message names both architectures and the difference.
    """
    first, own = clients[0], _shapes(clients[0])
    method = type(first).__name__
    for client, label in zip(clients[1:], labels[1:], strict=True):
        other = _shapes(client)
        different = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        inside = [name for name in different if name.removeprefix("global_model.").startswith("encoder.")]
        if inside:
            name, shapes = inside[0], (own.get(inside[0]), other.get(inside[0]))
            raise ConfigurationError(
                f"{method} shares {', '.join(first.shared)}, which differs between {labels[0]} and {label} "
                f"({len(inside)} tensors; the first: {name} has shape {shapes[0]} in one, {shapes[1]} in the other); "
                "use one encoder for all clients, or a method that shares no encoder (LocalOnly, LGFedAvg, FD, FML, "
                "FedKD, FedMD, KTpFL, FedProto, FedTGP, FedGH, FedClassAvg, DCPFL)"
            )
        if different and different[0].startswith("partner."):
            raise ConfigurationError(
                f"{method} needs one partner for all clients, which by default is like their own network: "
                f"{different[0]} differs between {labels[0]} and {label}; give {method} a partner=, the name of an "
                "encoder or what makes one"
            )
        widths = (width_of(first.encoder), width_of(client.encoder))
        if widths[0] != widths[1] and (first.equal_features or different):
            raise ConfigurationError(
                f"{method} needs encoders with features of one width: {labels[0]} has {widths[0]}, {label} has "
                f"{widths[1]}; give one of them a last linear layer (out_features), or use a method for which widths "
                "may differ (LocalOnly, FD, FedMD, KTpFL, or FML and FedKD with a partner)"
            )
        if different:
            raise ConfigurationError(
                f"{method} sends {different[0]}, which differs between {labels[0]} and {label}; use one encoder for "
                "all clients, or a method that shares less"
            )


def width_of(encoder: nn.Module) -> int:
    """Width of an encoder's features, d."""
    return cast(int, encoder.out_features)


def summarize_architectures(
    clients: Sequence[FederatedClient], labels: Sequence[str], groups: Sequence[int]
) -> list[ArchitectureSummary]:
    """Summary of each architecture, with its number of clients."""
    rows = []
    for index, (client, label) in enumerate(zip(clients, labels, strict=True)):
        state = client.state_dict()
        rows.append(
            ArchitectureSummary(
                encoder=label,
                features=getattr(client.encoder, "out_features", None),
                parameters=sum(p.numel() for p in client.parameters()),
                shared=sum(state[name].numel() for name in client.shared_names()),
                clients=sum(group == index for group in groups),
            )
        )
    return rows


def _shapes(client: FederatedClient) -> dict[str, tuple[int, ...]]:
    state = client.state_dict()
    return {name: tuple(state[name].shape) for name in client.shared_names()}
