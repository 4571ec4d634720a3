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


class Leaking(FederatedClient):
    """Leaves what it has learned of one client to the next."""

    batch_norm = "shared"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.history = []

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.history.append(batch_idx)
        return output


class Decaying(FederatedClient):
    batch_norm = "shared"

    def make_update(self, context, before):
        self.lr *= 0.9
        return super().make_update(context, before)


class Tidy(Leaking):
    """Drops at the end of a fit what it has needed in it."""

    def make_update(self, context, before):
        self.history.clear()
        return super().make_update(context, before)


@ENGINES
@pytest.mark.parametrize(("method", "name"), [(Leaking, "history"), (Decaying, "lr"), (Tidy, None), (Own, None)])
def test_an_attribute_that_a_fit_leaves(engine, method, name, caplog):
    run(partial(method, lr=0.05, epochs=1), 3, engine=engine())
    said = [r.getMessage() for r in caplog.records if "was changed by the first local fit" in r.getMessage()]
    assert len(said) == (name is not None)
    assert all(f"{method.__name__}.{name}" in message for message in said)
