"""State of clients: named tensors selected, stored and written.

=======================================  ==========================================================================
``tensors``                              ``select_state``, ``load_state`` and ``TensorDict``: parts of a state by name
``architectures``                        client modules for the encoders of a federation
``closures``                             ``copy_module``: a copy whose functions hold its own layers
``clients``                              ``Clients``: modules, stored states and resume states of a federation
``client_states``                        a state for each client, in memory or in a file
``checkpoints``                          files of checkpoints, written as a whole, read with their checksums verified
``best_round``                           which checkpoints stay: of the last and of the best round
``equality``                             ``same``: whether two values hold the same
``files``                                files written as a whole or not at all
``image``                                what a server or client held before: has it changed, and putting it back
``update_norms``                         ``UpdateGuard``: how far updates lie from what was sent, and from others
=======================================  ==========================================================================

Stores larger than ``client_state_memory_gb`` go to files in ``spill_dir`` (``spill_to_disk``).
"""
