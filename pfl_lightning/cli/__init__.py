"""The command line."""

from pfl_lightning.cli.federated_cli import FederatedCLI
from pfl_lightning.cli.main import main

__all__ = ["FederatedCLI", "main"]
