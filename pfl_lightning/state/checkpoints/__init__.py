"""Checkpoints of a federation, and its clients' models as plain files.

=======================================  ==========================================================================
``writing``                              written as a whole, and checked before they are loaded; the one before the last
``file``                                 read with their checksums verified; those of a project's module
``best_round``                           checkpoint of the best round
``export``                               clients' models as plain files
=======================================  ==========================================================================
"""

from pfl_lightning.state.checkpoints.writing import AtomicCheckpointIO, check_fits, use_atomic_files

__all__ = ["AtomicCheckpointIO", "check_fits", "use_atomic_files"]
