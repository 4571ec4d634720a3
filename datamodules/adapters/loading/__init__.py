"""Loaders of a project, read batch by batch: their stages, order and streams.

=============================================  ====================================================================
``stages``, ``combined``                       loaders of a project by stage; several loaders of one stage
``streams``                                    batches of a client's own loader
``orders``                                     samplers of the user's own
``plain_values``                               plain attributes of a data set, which worker processes are told
=============================================  ====================================================================
"""
