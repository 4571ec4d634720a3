"""FFA-LoRA."""

from __future__ import annotations

from torch import nn

from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.methods._lora import named_a


class FFALoRA(FederatedClient):
    """Low-rank adapters of which the matrices A keep their first values, and the matrices B are averaged.

    The mean of products B A is then the product of the mean of B and A, which it is not where both train. What else
    trains, such as a classifier, is averaged, too.

    Args:
        encoder: A model with parameters named ``lora_A`` and ``lora_B``, as peft makes them.
        num_classes: Number of classes, C.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Improving LoRA in Privacy-preserving Federated Learning", "Sun et al.", "ICLR", 2024)
    model_agnostic = True
    batch_norm = "shared"

    def assemble(self, encoder: nn.Module) -> None:
        """Freeze the matrices A, which then neither train nor travel."""
        for parameter in named_a(encoder, "FFALoRA").values():
            parameter.requires_grad_(False)
        super().assemble(encoder)
