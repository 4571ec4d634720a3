"""The command line."""

from pfl_lightning.cli.main import FederatedCLI, main

__all__ = ["FederatedCLI", "main"]
