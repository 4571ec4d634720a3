"""Checkpoints of a federation, and its clients' models as plain files.

=======================================  ==========================================================================
``file``                                 written as a whole, read with their checksums verified
``best_round``                           checkpoint of the best round
``export``                               clients' models as plain files
=======================================  ==========================================================================
"""

from pfl_lightning.state.checkpoints.file import AtomicCheckpointIO, use_atomic_files

__all__ = ["AtomicCheckpointIO", "use_atomic_files"]
