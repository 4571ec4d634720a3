"""Adapters that divide user-defined Datasets, DataLoaders and LightningDataModules among clients.

=============================================  ====================================================================
Data modules
``user_data``                                  ``FromDatasets``, ``FromLightning``: read once into tensors
``loaders``                                    a LightningDataModule or loaders, whose items are read batch by batch
``silos``, ``given_silos``                     data that clients bring: a data module, a loader or a data set each
``item_datamodule``                            base of those whose samples are items
What they read
``stages``, ``combined``                       loaders of a project by stage; several loaders of one stage
``reloading``                                  loaders that are asked for once more between rounds
``sources``, ``item_source``                   items behind a loader, with its collate function, order and workers
``items``, ``streams``                         splits and batches of items; those of a client's own loader
``orders``, ``workers``                        samplers of the user's own; worker processes, which clients share
``reading``                                    whole Datasets as tensors
``labels``, ``loader_classes``                 classes of items, where a partition needs them
=============================================  ====================================================================
"""
