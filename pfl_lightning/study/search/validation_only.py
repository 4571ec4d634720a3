"""The callback of a search's trials, which must not see test parts."""

from __future__ import annotations

import lightning as L

__all__ = ["ValidationOnly"]


class ValidationOnly(L.Callback):
    """Leaves the clients' test parts alone during a fit."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Say so to the federation."""
        pl_module.tests_in_fits = False  # type: ignore[assignment]
