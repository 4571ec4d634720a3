"""The user's own Datasets, DataLoaders and DataModules as federated data."""
