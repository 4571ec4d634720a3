"""Statistics of features by class."""
