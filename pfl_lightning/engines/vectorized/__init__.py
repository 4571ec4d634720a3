"""Clients of one architecture, trained and evaluated together by ``torch.func``.

A fit goes through the files as follows. ``engine`` takes the tasks in ``groups``; ``limits`` tells which clients cannot
be vectorized, and why. ``stack`` stacks the members' parameters and buffers along a leading axis, and ``phase`` trains
the stack through one phase: ``batches`` stacks the clients' next batches, ``step`` runs forward and backward pass,
``gradients`` unscales and clips, and ``optimizer`` steps the stacked parameters (its state by client:
``optimizer_state``). ``computation`` holds the ways to compute a step, made by its ``factory``: ``eager`` under
``vmap``, ``compiled``, or captured as a ``cuda_graph``.

An evaluation starts in ``evaluation``, which fine-tunes clients as above; ``stacked_evaluation`` then vectorizes their
forward passes over ``evaluation_batches``.
"""

from pfl_lightning.engines.vectorized.engine import VectorizedEngine

__all__ = ["VectorizedEngine"]
