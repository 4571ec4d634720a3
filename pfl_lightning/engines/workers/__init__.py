"""Engines with worker processes, on this machine or by Ray.

``engine`` cuts the tasks of a round into jobs and sends common tensors once; ``packing`` turns objects and tensors into
bytes, sends them over pipes and shares them in memory. ``pool`` hands jobs to workers, replaces dead workers and
returns replies in order. ``worker`` runs in a worker process, around an ordinary engine. Workers are started by
``processes`` on this machine, or by ``ray``.
"""
