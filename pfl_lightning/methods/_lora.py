"""The matrices of low-rank adaptation (LoRA) in a model, by their names."""

from __future__ import annotations

from torch import nn

from pfl_lightning.errors import ConfigurationError

MATRICES_A = ("lora_A", "lora_embedding_A")
"""Names of the matrices A in peft and in loralib."""


def named_a(model: nn.Module, method: str) -> dict[str, nn.Parameter]:
    """Matrices A of a model by name.

    Args:
        model: The model.
        method: Name of the method that needs them.

    Raises:
        ConfigurationError: It has none.
    """
    found = {name: p for name, p in model.named_parameters() if not set(MATRICES_A).isdisjoint(name.split("."))}
    if not found:
        raise ConfigurationError(
            f"{method} is for models with low-rank adapters (LoRA), and no parameter of {type(model).__name__} has "
            "lora_A in its name: wrap the network by peft.get_peft_model(network, LoraConfig(...)) in the module's "
            "__init__"
        )
    return found
