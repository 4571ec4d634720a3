"""Clients trained in worker processes."""

from pfl_lightning.engines.ray.engine import RayFit

__all__ = ["RayFit"]
