"""The command line.

=======================================  ==========================================================================
``main``, ``commands``                   ``pfl`` and its subcommands; what is answered without an import of torch
``federated_cli``, ``trainer``           subcommands of the Trainer: options, callbacks and folders of a run
``tables``, ``stopping``                 what they print at their end; signals, exit codes, and how to go on
``compare``, ``methods``                 ``pfl compare`` and ``pfl methods``
``parser``, ``config_files``             the parser of options, and the YAML files that it reads
``messages``                             what is said of mistakes, and which name was probably meant
``allowed``                              what a config may name
``exported``                             ``pfl predict --exported``: of an exported model's files alone
=======================================  ==========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pfl_lightning.cli.main import main

if TYPE_CHECKING:  # imported by __getattr__ when it is asked for: `pfl --help` needs no Lightning
    from pfl_lightning.cli.federated_cli import FederatedCLI

__all__ = ["FederatedCLI", "main"]


def __getattr__(name: str) -> Any:
    """Import ``FederatedCLI`` when it is first used (PEP 562)."""
    if name != "FederatedCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pfl_lightning.cli.federated_cli import FederatedCLI

    return FederatedCLI
