"""Statistics of features by class.

``class_statistics`` accumulates and merges them, ``summaries`` has FedPAC's quantities, ``gaussians`` DC-PFL's models.
"""
