"""Export of clients' adapters in the format of peft."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.exported import exported_clients


def export_adapters(
    federation: Federation, folder: str | Path, clients: Iterable[int | str] | None = None
) -> list[Path]:
    """Write every client's adapter in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``peft.PeftModel.from_pretrained(base, folder)`` loads it, where ``base`` is the model that was adapted. A client's
    model is the one it is evaluated with, fine-tuned if the method does so before an evaluation.

    Args:
        federation: A federation that has been fitted, or has loaded a checkpoint.
        folder: Folder of the folders ``client_<number>``; made if it does not exist. Where a module has several adapted
            networks, there is a folder in it for each, under its name in the module.
        clients: Numbers or names of clients; ``None`` for all.

    Returns:
        The folders.

    Raises:
        ConfigurationError: peft is not installed, or the clients' module has no network of it.
        FederationError: The federation has not been fitted or evaluated yet.
        IndexError: There is no such client.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigurationError("export_adapters needs peft: pip install 'pfl-lightning[peft]'") from error
    target, written = Path(folder), []
    for client, name in exported_clients(federation, clients):
        module: Any = federation.client_model(client)
        adapted = {own: layer for own, layer in module.named_modules() if isinstance(layer, PeftModel)}
        if not adapted:
            raise ConfigurationError(
                f"{type(module).__name__} has no network of peft (PeftModel), and so no adapter to export: use "
                "export_clients, which writes whole models"
            )
        place = target / name
        for network_name, network in adapted.items():
            own = place / network_name if len(adapted) > 1 else place
            network.save_pretrained(str(own))
            written.append(own)
    return written
