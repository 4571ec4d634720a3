"""``pfl methods``: what a config can name."""

from __future__ import annotations

from rich.console import Console

__all__ = ["print_methods"]


def print_methods(args: list[str]) -> None:
    """Print the methods with paper and year, and the encoders; with a config, the architectures of its federation."""
    if {"-h", "--help"} & set(args):
        print(
            "usage: pfl methods                  the methods and the encoders\n"
            "       pfl methods --config FILE    the architectures of a run, and how many clients have each"
        )
        return None
    if args:
        from pfl_lightning.callbacks import architecture_table
        from pfl_lightning.cli.federated_cli import FederatedCLI

        cli = FederatedCLI(args=args, run=False)
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        rows, number = cli.model.describe(cli.datamodule), cli.datamodule.num_clients
        return Console().print(architecture_table(rows, f"{number} clients"))
    from pfl_lightning.cli.tables import encoders_table, methods_table

    Console().print(methods_table())
    Console().print(encoders_table())
    return None
