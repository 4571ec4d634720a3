"""Pure functions on tensors: averages, losses, class statistics and combination weights.

Nothing here keeps state between rounds; whoever calls owns the state.
"""

from pfl_lightning.functional.averaging import RunningAverage, weighted_average
from pfl_lightning.functional.combination import combination_weights
from pfl_lightning.functional.losses import alignment_loss, proximal_term
from pfl_lightning.functional.statistics import ClassStatistics, feature_variance, weighted_class_means

__all__ = [
    "ClassStatistics",
    "RunningAverage",
    "alignment_loss",
    "combination_weights",
    "feature_variance",
    "proximal_term",
    "weighted_average",
    "weighted_class_means",
]
