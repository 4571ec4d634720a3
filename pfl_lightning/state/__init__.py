"""State of clients: named tensors selected, stored and written.

=======================================  ==========================================================================
``tensors``                              ``select_state``, ``load_state`` and ``TensorDict``: parts of a state by name
``architectures``                        client modules for the encoders of a federation
``closures``                             ``copy_module``: a copy whose functions hold its own layers
``clients``                              ``Clients``: modules and stored states of a federation
``client_states``                        per-client state stores, of one or several architectures
``row_storage``                          their arrays, in memory or in a file
``resume_states``                        what a local fit hands on to the client's next, as bytes
``checkpoints``                          checkpoints of a federation, and clients' models as plain files
``equality``                             ``same``: whether two values hold the same
``files``                                files written as a whole or not at all
``image``                                what a server or client held before: has it changed, and putting it back
``update_norms``                         ``UpdateGuard``: how far updates lie from what was sent, and from others
=======================================  ==========================================================================

Stores larger than ``client_state_memory_gb`` go to files in ``spill_dir`` (``spill_to_disk``).
"""
