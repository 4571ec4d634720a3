"""The module that the outer Trainer fits: the server, the clients' modules, and every client's state.

====================  ==================================================================================================
``base``              ``Federation``: what it is made of, and its set-up
``single_items``      batches of one item that batch normalization does not take
``rounds``            what it holds; a communication round as an epoch of the Trainer
``loop``              ``RoundLoop``, the callback that drives the rounds (``FederatedLoop`` is it with ``method=``)
``cohorts``           which clients a share or a number means
``resume``            where a fit starts that follows another one
``divergence``        when a run is said to diverge
``curves``            curves of a resumed run in TensorBoard
``engine_hooks``      when the engine starts and stops
``evaluation_hooks``  validation and test of every client's own model
``client_models``     every client's own model
``evaluation``        an evaluation under way, and its summary
``progress_bar``      what Lightning's progress bar says
``personalization``   the second stage, in which clients adapt what they are evaluated with
``outer_callbacks``   callbacks of Lightning that the outer Trainer has no use for
``saved_state``       checkpoints
====================  ==================================================================================================
"""

import warnings

from pfl_lightning.federation.base import Federation

# Of Lightning's own code, about torch: nobody who runs a federation can do anything about it.
warnings.filterwarnings(
    "ignore",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    module=r"(lightning\.pytorch|pytorch_lightning)\.utilities\._pytree",
)

__all__ = ["Federation"]
