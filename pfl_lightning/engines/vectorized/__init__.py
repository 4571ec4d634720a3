"""Clients of one architecture, trained and fine-tuned together by ``torch.func``.

A fit goes through the files as follows. ``engine`` takes the tasks in ``groups``; ``limits`` tells which clients cannot
be vectorized, and why. ``stack`` stacks the members' parameters and buffers along a leading axis, and ``phase`` trains
the stack through one phase: it stacks the clients' next batches; ``step`` runs forward and backward pass under
``vmap``, which may be captured (``graphs``); ``phase`` clips each client's gradients, and ``optimizer``
steps the stacked parameters.

An evaluation fine-tunes clients in the same way and scores them one by one.
"""

from pfl_lightning.engines.vectorized.engine import VectorizedEngine

__all__ = ["VectorizedEngine"]
