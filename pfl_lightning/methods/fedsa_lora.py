"""FedSA-LoRA."""

from __future__ import annotations

from torch import nn

from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods._lora import named_a
from pfl_lightning.options import ClientOptions, Unpack


class FedSALoRA(FederatedClient):
    """Low-rank adapters of which the matrices A are averaged, and the matrices B are each client's own.

    Both train. What else trains, such as a classifier, is the client's own, too.

    Args:
        encoder: A model with parameters named ``lora_A`` and ``lora_B``, as peft makes them.
        num_classes: Number of classes, C.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Selective Aggregation for Low-Rank Adaptation in Federated Learning", "Guo et al.", "ICLR", 2025
    )
    model_agnostic = True
    shared: tuple[str, ...] = ("*.lora_A.*",)
    batch_norm = "own"

    def __init__(self, encoder: nn.Module, num_classes: int, **options: Unpack[ClientOptions]) -> None:
        names = list(named_a(encoder, "FedSALoRA"))
        super().__init__(encoder, num_classes, **options)
        self.shared = tuple(f"*.{name}" for name in names)
        if not self.shared_names():
            raise ConfigurationError(
                f"FedSALoRA averages the matrices A of LoRA, and those of {type(encoder).__name__} are frozen: let "
                "them train, or use FFALoRA"
            )
