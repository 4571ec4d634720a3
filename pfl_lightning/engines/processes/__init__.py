"""Clients trained and evaluated in worker processes of this machine, without Ray.

``engine`` has the options; ``host`` starts the processes and speaks with them; ``transport`` has the messages and the
shared memory; ``child`` is what a process runs. The rest is that of all worker processes:
:mod:`pfl_lightning.engines.workers`.
"""

from pfl_lightning.engines.processes.engine import ProcessEngine

__all__ = ["ProcessEngine"]
