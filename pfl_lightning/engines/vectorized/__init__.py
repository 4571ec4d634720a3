"""Clients of one architecture trained together by torch.func."""

from pfl_lightning.engines.vectorized.engine import VectorizedEngine

__all__ = ["VectorizedEngine"]
