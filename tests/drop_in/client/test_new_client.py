"""Clients of methods on a user's module, and the methods that have none."""

import copy
import pickle

import pytest
from _helpers.project import Data, Net
from _helpers.toy import FEATURES, assert_same, for_toy, quiet_trainer, run

from pfl_lightning import federate
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Calibre, FedAvg, FedPAC
from pfl_lightning.phases import Personalization


@pytest.mark.parametrize(("method", "settings"), [(FedAvg, {}), (FedPAC, {}), (Calibre, {"clusters": 2})])
def test_clients_are_of_the_methods_own_class(method, settings):
    federation, data = federate(Net(), Data(), method, num_clients=3, seed=1, **settings)
    quiet_trainer(1).fit(federation, datamodule=data)
    client = federation.clients.models[0]
    for one in (client, copy.deepcopy(client), pickle.loads(pickle.dumps(client))):
        assert type(one) is method
        assert one.user_module.client is one
        assert one.module is one.user_module.module
        if method.feature_based:  # whatever steps it has
            assert one.training_step.__self__ is one.user_module


class PassingOn(FedPAC):
    def __init__(self, encoder, num_classes, *, extra=1.0, **options):
        super().__init__(encoder, num_classes, **options)
        self.extra = extra


class Longer(FedPAC):
    def __init__(self, encoder, num_classes, *, epochs=3, **options):
        super().__init__(encoder, num_classes, epochs=epochs, **options)


class Closed(FedAvg):
    def __init__(self, encoder, num_classes):
        super().__init__(encoder, num_classes, epochs=2)


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        (FedPAC, {}, (1, None)),
        (PassingOn, {}, (1, None)),
        (PassingOn, {"head_lr": 0.2, "extra": 2.0, "epochs": 4}, (4, 0.2)),
        (Longer, {}, (3, None)),
        (Closed, {}, (2, "none")),
    ],
)
def test_subclasses_take_the_module_s_rate_and_one_epoch(method, settings, expected):
    federation, data = federate(Net(), Data(), method, num_clients=3, seed=1, **settings)
    quiet_trainer(1).fit(federation, datamodule=data)
    client = federation.clients.models[0]
    assert (client.epochs, getattr(client, "head_lr", "none")) == expected


def test_a_federation_is_pickled_before_and_after_a_fit():
    federation, data = federate(Net(), Data(), FedAvg, num_clients=3, seed=1)
    other, other_data = pickle.loads(pickle.dumps((federation, data)))
    for one, own in ((federation, data), (other, other_data)):
        quiet_trainer(1).fit(one, datamodule=own)
    expected = dict(federation.global_model().state_dict())
    assert_same(dict(other.global_model().state_dict()), expected, atol=0.0)
    later = pickle.loads(pickle.dumps(federation))
    assert_same(dict(later.global_model().state_dict()), expected, atol=0.0)


def test_what_the_message_says_of_methods_with_steps_of_their_own_works():
    """Layers of the module are the encoder of a Federation, and get the trained weights back."""

    class Own(Calibre):
        feature_based = False

    with pytest.raises(ConfigurationError, match=r"Federation\(Own, encoder=lambda shape: Net\(\).backbone\)"):
        federate(Net(), Data(), Own, num_clients=3)

    def layers(shape):
        body = Net().body
        body.out_features = FEATURES
        return body

    federation = run(for_toy(Own, epochs=1), encoder=layers)
    trained = federation.client_model(0).encoder.state_dict()
    net = Net()
    before = {name: value.clone() for name, value in net.body.state_dict().items()}
    net.body.load_state_dict(trained)
    assert any(not value.equal(before[name]) for name, value in net.body.state_dict().items())
    with federation.personalized(Personalization(epochs=1)):
        trainer = quiet_trainer(1)
        trainer.test(federation, datamodule=federation.trainer.datamodule, verbose=False)
    assert "test_accuracy/mean" in trainer.callback_metrics
