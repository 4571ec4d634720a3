"""Architectures of a federation: a client module for each encoder, checked and summarized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.encoders import EncoderAssignment, EncoderFactory, RoundRobin, build_encoder, encoder_label
from pfl_lightning.errors import ConfigurationError, is_out_of_memory
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.closures import copy_module

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
            "encoder must be a name, such as 'mlp', a module, a function that makes one from the shape of a sample, "
            f"or a list of these; got {choice!r}"
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
    clients, shape = list[FederatedClient](), data.input_shape
    samples = next(data.client_data(0).train.split(2)).loader(2).tensors()[0]
    for index, (make, label) in enumerate(zip(assignment.encoders, assignment.labels, strict=True)):
        with torch_seed(derive_seed(seed, Purpose.INITIAL_WEIGHTS, *([index] if index else []))):
            client = make_client(_encoder_of(make, shape), data.num_classes)
        clients.append(client)
        further = []
        for number in range(1, 1 if isinstance(make, nn.Module) else client.further_encoders + 1):
            with torch_seed(derive_seed(seed, Purpose.FURTHER_WEIGHTS, index, number)):
                further.append(_encoder_of(make, shape))
        if further:
            client.take_encoders(further)
        check_features(label, client.encoder, samples)
        if client.partner_encoder is not None:
            label = f"of the partner ({encoder_label(client.partner_encoder)})"
            with torch_seed(derive_seed(seed, Purpose.PARTNER_WEIGHTS)):  # the same beside every architecture
                partner = _encoder_of(client.partner_encoder, shape, label)
                client.attach_partner(partner)
            check_features(label, partner, samples)
    check_shared(clients, assignment.labels)
    return clients


def _encoder_of(make: str | EncoderFactory, input_shape: tuple[int, ...], label: str = "") -> nn.Module:
    """An encoder that says how wide its features are; ``label`` is its name in errors, by default that of its class."""
    try:
        if isinstance(make, nn.Module):
            encoder = _copy_of(make, input_shape)
        else:
            encoder = build_encoder(make, input_shape) if isinstance(make, str) else make(input_shape)
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        remedy = "an encoder is a class or function that takes input_shape and returns a module with out_features"
        if is_out_of_memory(error):
            remedy = "it does not fit into memory: make its layers smaller, or the inputs"
        raise ConfigurationError(
            f"the encoder {label or encoder_label(make)} could not be made for inputs of shape {input_shape}: "
            f"{_reason(error)}; {remedy}"
        ) from error
    if not isinstance(getattr(encoder, "out_features", None), int):
        raise ConfigurationError(
            f"the encoder {label or type(encoder).__name__} has no integer attribute out_features (the width of its "
            "features): set it where the network is made (such as network.out_features = 64), or use an encoder of the "
            "package by its name"
        )
    return encoder


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]  # torch adds its stack


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
    try:
        with torch_seed(0), evaluating(encoder):
            found = encoder(samples)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the encoder {label} fails on inputs of shape {tuple(samples.shape)} and type {samples.dtype}: "
            f"{_reason(error)}; inputs and parameters must be of one type, float32 (.float()), unless the encoder "
            "takes indices (nn.Embedding); the Trainer's precision converts both"
        ) from error
    expected = (len(samples), width_of(encoder))
    if not isinstance(found, Tensor) or tuple(found.shape) != expected:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigurationError(
            f"the encoder {label} must map inputs of shape {tuple(samples.shape)} to features of shape {expected} "
            f"(out_features is {expected[1]}), it gives {got}"
        )


def check_shared(clients: Sequence[FederatedClient], labels: Sequence[str]) -> None:
    """Check that the shared part is the same for all architectures.

    Raises:
        ConfigurationError: The shared part differs; the message names both architectures and the difference.
    """
    first, own = clients[0], _shapes(clients[0])
    for client, label in zip(clients[1:], labels[1:], strict=True):
        other = _shapes(client)
        found: list[tuple[str, Any, Any]] = [(name, own.get(name), other.get(name)) for name in {**own, **other}]
        if first.equal_features:
            found.append(("the features' width", width_of(first.encoder), width_of(client.encoder)))
        different = [f"{name} is {one} in {labels[0]} and {two} in {label}" for name, one, two in found if one != two]
        if different:
            raise ConfigurationError(
                f"{type(first).__name__} needs the same shapes in all architectures of what clients share, and "
                f"{different[0]}: use one encoder for all clients; one partner= for all, where the method has one; "
                "encoders with features of one width (a last linear layer, out_features); or a method that shares less "
                "(LocalOnly, LGFedAvg, FD, FML, FedKD, FedMD, KTpFL, FedProto, FedTGP, FedGH, FedClassAvg, DCPFL)"
            )


def width_of(encoder: nn.Module) -> int:
    """Width of an encoder's features, d."""
    return cast(int, encoder.out_features)


def _shapes(client: FederatedClient) -> dict[str, tuple[int, ...]]:
    state = client.state_dict()
    return {name: tuple(state[name].shape) for name in client.shared_names()}
