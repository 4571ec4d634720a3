"""The base of every method's client.

==================  ==============================================================
``base``            ``FederatedClient``: what a method overrides, Lightning's hooks
``declarations``    names that are shared, personal or fixed; names of loss terms
``model``           features and head of its model; how engines train, evaluate and copy it
==================  ==============================================================
"""

from pfl_lightning.client.base import FederatedClient
from pfl_lightning.fit.context import Batch, Citation, FitContext
from pfl_lightning.phases import Phase

__all__ = ["Batch", "Citation", "FederatedClient", "FitContext", "Phase"]
