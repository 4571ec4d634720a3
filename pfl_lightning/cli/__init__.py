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

from pfl_lightning.cli.main import main

__all__ = ["main"]
