"""Checkpoints of a federation, and its clients' models as plain files.

=======================================  ==========================================================================
``writing``                              written as a whole, and checked before they are loaded
``file``                                 read with their checksums verified; what to take instead of a damaged one
``previous``                             the checkpoint before the last one, until a round has trained from that
``module``                               checkpoints of a project, as its module's ``load_from_checkpoint`` takes them
``best_round``                           checkpoint of the best round
``export``                               clients' models as plain files
=======================================  ==========================================================================
"""

from pfl_lightning.state.checkpoints.writing import AtomicCheckpointIO, check_fits, use_atomic_files

__all__ = ["AtomicCheckpointIO", "check_fits", "use_atomic_files"]
