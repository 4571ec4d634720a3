"""What methods refuse of their arguments is a mistake of the configuration, which ``pfl`` exits for with status 2."""

from functools import partial

import pytest
from _helpers.toy import CLASSES, INPUTS, tiny_encoder

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import (
    APFL,
    DCPFL,
    FML,
    PFLSSL,
    FedALA,
    FedAMP,
    FedClassAvg,
    FedDBE,
    FedEMA,
    FedFomo,
    FedKD,
    FedPAC,
    KNNPer,
    PFedHN,
    PFedMe,
)
from pfl_lightning.self_supervised import BYOL, SMoG, SwAV

REFUSED = [
    (APFL, {"alpha": 1.5}),
    (DCPFL, {"virtual_features": 2}),
    (FML, {"beta": 1.5}),
    (FedALA, {"sample_share": 1.5}),
    (FedAMP, {"own_share": 1.5}),
    (FedAMP, {"attention": "gaussian", "own_share": 0.5}),
    (FedAMP, {"step": 1.0}),
    (FedAMP, {"eval_model": "aggregated"}),
    (FedClassAvg, {"objective": "published", "temperature": 1.0}),
    (FedDBE, {"mean_momentum": 1.5}),
    (FedEMA, {"tau": 1.5}),
    (FedFomo, {"exploration": 1.5}),
    (FedKD, {"energy_end": 1.2}),
    (FedKD, {"energy_start": 0.9, "energy_end": 0.8}),
    (FedPAC, {"threshold": 1.0}),
    (KNNPer, {"weight": 1.5}),
    (PFedHN, {"batch_norm": "shared"}),
    (PFedMe, {"lam": 100.0, "inner_lr": 0.1}),
    (PFedMe, {"lam": 100.0, "inner_lr": 0.001, "lr": 0.1}),
    (PFLSSL, {"objective": partial(BYOL, momentum=1.5)}),
    (PFLSSL, {"objective": partial(SMoG, beta=1.5)}),
    (PFLSSL, {"objective": partial(SwAV, epsilon=1e-6)}),
]


@pytest.mark.parametrize(
    ("method", "options"), REFUSED, ids=[f"{method.__name__}, {', '.join(options)}" for method, options in REFUSED]
)
def test_it_is_a_mistake_of_the_configuration(method, options):
    with pytest.raises(ConfigurationError):
        method(tiny_encoder((INPUTS,)), CLASSES, **options)
