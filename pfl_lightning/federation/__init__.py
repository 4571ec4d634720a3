"""The module that the outer Trainer fits: the server, the clients' modules, and every client's state.

====================  ==================================================================================================
``federation``        ``Federation``: the LightningModule, whose hooks the outer Trainer calls
``set_up``            what it is made of, and what is refused before the first round
``loop``              ``RoundLoop``, the callback that drives the rounds (``FederatedLoop`` is it with ``method=``)
``private_rounds``    what privacy asks of the loop: who takes part, and rounds within the budget
``outer_trainer``     what the outer Trainer is told of rounds: where a fit goes on, its loaders, curves and bar
``outer_callbacks``   callbacks and options of Lightning that the outer Trainer has no use for
``preemption``        signals of SLURM wait for the end of the round
``divergence``        when a run is said to diverge
``evaluation``        an evaluation under way, and its summary
``own_models``        every client's own model
``exported``          the same as files, and built from these
``predictions``       of a client's own model
``personalization``   the second stage, in which clients adapt what they are evaluated with
``saved_state``       checkpoints
====================  ==================================================================================================
"""

import warnings

from pfl_lightning.federation.federation import Federation

# Of Lightning's own code, about torch: nobody who runs a federation can do anything about it.
warnings.filterwarnings(
    "ignore",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    module=r"(lightning\.pytorch|pytorch_lightning)\.utilities\._pytree",
)

__all__ = ["Federation"]
