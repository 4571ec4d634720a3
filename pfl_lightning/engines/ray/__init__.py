"""Clients trained and evaluated in worker processes of Ray.

``engine`` has the options; ``cluster`` connects to Ray, ``services`` watches over it, and ``host`` starts workers
there. The rest is that of all worker processes: :mod:`pfl_lightning.engines.workers`.
"""

from pfl_lightning.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
