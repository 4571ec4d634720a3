"""Studies: a file that names methods, settings and seeds, whose runs make one table.

=======================================  ==========================================================================
``command``                              ``pfl study`` and ``pfl reproduce``, and what their command lines say
``reader``                               what a study consists of, and what its file may hold
``plan``, ``options``                    rows and runs, with configs and folders; configs read and changed by paths
``conduct``                              the steps of one command: plan, check, search, run, report
``check``                                configs are checked before anything is run
``runner``                               how far a run is, by its folder; runs them, several at once, beside others
``callbacks``, ``display``               a run says how far it is; what is shown of all of them, and the table
``searches``, ``tuner``                  rows whose options are searched; the search and its trials with optuna
=======================================  ==========================================================================
"""
