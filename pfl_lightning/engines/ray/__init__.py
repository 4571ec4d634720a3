"""Clients trained in worker processes."""

from pfl_lightning.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
