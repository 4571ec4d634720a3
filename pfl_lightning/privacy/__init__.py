"""Client-level differential privacy: what the server learns of a cohort is a noisy sum of bounded contributions.

==============  ========================================================================
``options``     ``ClientPrivacy``: bounds, noise and the budget
``bounding``    contributions of bounded norm, and the update that stands for their mean
``accountant``  epsilon of the rounds so far, by opacus
``mechanism``   secret seed, cohorts, sums, noise and the adaptive bound of a run
==============  ========================================================================
"""

from pfl_lightning.privacy.options import ClientPrivacy

__all__ = ["ClientPrivacy"]
