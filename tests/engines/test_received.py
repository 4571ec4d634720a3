"""A client begins its fit with nothing of another client's."""

from functools import partial

import pytest
import torch
from _helpers.toy import run

from pfl_lightning import Broadcast, FederatedClient, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.server import AveragingAggregator

ENGINES = pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine, VectorizedEngine])


class HeadAlone(AveragingAggregator):
    """Sends the head, where the encoder is shared, too."""

    def broadcast(self, client, round):
        weights = self.weights.as_state()
        return Broadcast(client=client, round=round, weights={n: w for n, w in weights.items() if n[:4] == "head"})


class Forgetful(FederatedClient):
    batch_norm = "shared"

    def configure_aggregator(self, num_clients):
        return HeadAlone(self, num_clients)


class ByHand(Forgetful):
    """Sets the rest itself."""

    def receive(self, broadcast):
        super().receive(broadcast)
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.fill_(0.1)


class Own(Forgetful):
    """Keeps all that it trains, so that nothing of it needs to be sent."""

    eval_model = "trained"


class LateBuffer(FederatedClient):
    batch_norm = "shared"

    def before_fit(self, context):
        if not hasattr(self, "fits"):
            self.register_buffer("fits", torch.zeros(()))
        self.fits += 1


class EarlyBuffer(LateBuffer):
    shared = ("encoder.*", "head.*")

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("fits", torch.zeros(()))


@ENGINES
def test_shared_weights_that_nothing_sets(engine):
    said = r"^encoder\.\S+ is shared, and nothing sets it .* weights of the server's message"
    with pytest.raises(ConfigurationError, match=said):
        run(partial(Forgetful, lr=0.05, epochs=1), 1, engine=engine())


@ENGINES
@pytest.mark.parametrize("method", [ByHand, Own])
def test_weights_that_are_set_otherwise(engine, method):
    federation = run(partial(method, lr=0.05, epochs=1), 2, engine=engine())
    for client in range(federation.num_clients):
        assert all(tensor.isfinite().all() for tensor in federation.client_model(client).state_dict().values())


@ENGINES
def test_a_buffer_that_comes_late(engine):
    with pytest.raises(ConfigurationError, match="LateBuffer has fits after its first local fit"):
        run(partial(LateBuffer, lr=0.05, epochs=1), 1, engine=engine())
    federation = run(partial(EarlyBuffer, lr=0.05, epochs=1), 3, engine=engine())
    assert {float(federation.client_model(client).fits) for client in range(federation.num_clients)} == {3.0}
