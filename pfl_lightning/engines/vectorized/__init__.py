"""Clients of one architecture trained together by torch.func."""

from pfl_lightning.engines.vectorized.engine import VectorizedFit

__all__ = ["VectorizedFit"]
