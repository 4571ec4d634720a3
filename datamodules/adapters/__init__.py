"""Adapters that divide user-defined Datasets, DataLoaders and LightningDataModules among clients."""
