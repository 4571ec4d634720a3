"""Adapters that divide user-defined Datasets, DataLoaders and LightningDataModules among clients.

=============================================  ====================================================================
Data modules
``user_data``                                  ``FromDatasets``, ``FromLightning``: read once into tensors
``loaders``                                    a LightningDataModule or loaders, whose items are read batch by batch
``silos``                                      data that clients bring: a data module, a loader or a data set each
``leaf``                                       JSON files of LEAF, whose users are clients
What they read
``stages``                                     the loaders of a project by stage
``sources``                                    items behind a loader: which they are, and in which order they come
``samplers``                                   samplers of the user's own
``workers``                                    worker processes that clients share, and what they are told
``streams``                                    batches of a client's own loader; several loaders of one stage
``items``                                      splits and batches of items, and the base of data modules that have them
``labels``                                     classes of items, where a partition needs them
=============================================  ====================================================================
"""
