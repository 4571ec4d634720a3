"""The folder of a run, known in one place: its files, config, results and lock. Nothing here needs torch.

=======================================  ==========================================================================
``folder``                               where runs lie, which one a checkpoint is from, and who holds it
``files``                                names of the files in it, and what they hold, or an error that names one
``config``, ``changes``                  options of a config; what differs between two of them
``results``, ``reading``                 what a finished run says; from folders to that
``curves``                               every client's metrics round by round, and their picture
``lock``                                 a run is trained by one process
=======================================  ==========================================================================
"""
