"""Loaders of a project, read batch by batch: their stages, order, workers and streams.

=============================================  ====================================================================
``stages``, ``combined``                       loaders of a project by stage; several loaders of one stage
``loader_classes``                             classes of items, where a partition needs them
``streams``                                    batches of a client's own loader
``orders``, ``selections``                     samplers of the user's own; which items they give
``workers``, ``plain_values``                  worker processes, which clients share; what they are told of a data set
=============================================  ====================================================================
"""
