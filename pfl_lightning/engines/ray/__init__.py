"""Clients trained and evaluated in worker processes of Ray.

``engine`` cuts the tasks of a round into jobs. ``cluster`` connects to Ray; ``pool`` hands jobs to workers, replaces
dead workers and returns replies in order. ``payloads`` makes the messages to workers and sends common tensors once;
``packing`` turns objects and tensors into bytes. ``worker`` runs in a worker process, around an ordinary engine.
"""

from pfl_lightning.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
