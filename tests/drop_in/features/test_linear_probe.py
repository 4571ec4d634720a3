"""A personalization by a new head on the features of a user's module."""

from functools import partial

import pytest
import torch
from _helpers.project import Net, run_project
from _helpers.toy import CLASSES, FEATURES, run

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedGH, FedPAC
from pfl_lightning.phases import Personalization

PERSONALIZATION = Personalization("linear", epochs=3, lr=0.1, batch_size=4)
METHODS = {
    "shared encoder": (FedPAC, {"head_lr": 0.1, "alignment": 0.7, "epochs": 2}),
    "personal encoders": (FedGH, {"server_lr": 0.2, "epochs": 2}),
}


def personalized(federation):
    """Every client's scores, and the head of the last one, after a personalization; before and after it."""
    trainer = federation.trainer
    found = []
    with federation.personalized(PERSONALIZATION):
        own = federation._start_engine

        def start():
            own()
            found.extend(federation._stage.modules)

        federation._start_engine = start
        trainer.test(federation, datamodule=trainer.datamodule, verbose=False)
    return dict(federation.test_scores), found[0].head.state_dict()


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("name", METHODS)
def test_it_is_that_of_the_built_in_method(name, engine):
    method, options = METHODS[name]
    builtin = run(partial(method, lr=0.05, **options), engine=SequentialEngine(cache_features=False))
    federation, _ = run_project(method, module=Net(0.05), engine=engine(), **options)
    before = {name: value.clone() for name, value in federation.client_model(1).state_dict().items()}
    expected, head = personalized(builtin)
    found, own_head = personalized(federation)
    assert own_head.keys() == head.keys()
    for part, value in head.items():
        assert torch.equal(own_head[part], value), part
    for client, score in expected.items():
        assert found[client].accuracy == score.accuracy
        assert found[client].logged["test_loss"] == pytest.approx(score.loss, rel=1e-5)
    after = federation.client_model(1).state_dict()
    assert all(torch.equal(after[part], value) for part, value in before.items())


def test_a_head_that_cannot_be_made_new_is_refused():
    class Own(torch.nn.Module):
        """A linear layer behind a scale of its own."""

        def __init__(self):
            super().__init__()
            self.scale, self.linear = torch.nn.Parameter(torch.ones(())), torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, features):
            return self.scale * self.linear(features)

    class Scaled(Net):
        """Has it for a head."""

        def __init__(self):
            super().__init__()
            self.fc = Own()

    federation, trainer = run_project(FedPAC, module=Scaled(), head="fc")
    told = pytest.raises(ConfigurationError, match=r"Own at 'fc' has no reset_parameters.*use 'head'")
    with told, federation.personalized(PERSONALIZATION):
        trainer.test(federation, datamodule=trainer.datamodule, verbose=False)
