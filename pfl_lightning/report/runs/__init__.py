"""Finished runs as a report reads them: from folders to options, histories and clients' accuracies.

=======================================  ==========================================================================
``reading``                              finds the folders of runs and reads them
``files``                                what a run's files hold, or an error that names one that was cut
``run``                                  what a run says: evaluations, history, where it comes from
``options``, ``resumed``                 the options of a run's config, with those it went on with; what differs
``study_folder``                         what a study calls a run
=======================================  ==========================================================================
"""
