"""Both engines train every method alike, and neither depends on who trained before."""

from functools import partial

import pytest
import torch
from _helpers.methods import EVERY_METHOD
from _helpers.toy import (
    CLIENTS,
    Toy,
    assert_same,
    dropout_encoder,
    for_toy,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
)

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import DualFed, FedAvg, FedBABU, FedBN, FedGH, FedPAC, FedProto, FedRep

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")

COHORTS = [[0, 2, 3], [1, 2]]


@pytest.mark.slow  # test_every_engine.py compares them with one epoch, every method
@EVERY_METHOD
def test_engines_agree_bit_by_bit(method):
    fit = for_toy(method, lr=0.05, epochs=2)
    tight = run(fit, 2, cohorts=COHORTS, engine=SequentialEngine(cache_features=False))
    full = run(fit, 2, cohorts=COHORTS, engine=TrainerEngine())
    assert_same(whole_state(full), whole_state(tight))
    assert full.test_scores == tight.test_scores
    assert len(tight.test_scores) == CLIENTS


@pytest.mark.repeated
@pytest.mark.parametrize("encoder", [normed_encoder, dropout_encoder])
@pytest.mark.parametrize(
    "fit",
    [
        partial(FedPAC, epochs=1),
        partial(FedBN, epochs=1, lr=0.05),
        partial(DualFed, lr=0.05),
        partial(FedAvg, fine_tune="head", lr=0.05),
        partial(FedAvg, optimizer=torch.optim.Adam),
        partial(FedRep, lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)),
    ],
    ids=["FedPAC", "FedBN", "DualFed", "FedAvg-FT", "Adam", "scheduler"],
)
@pytest.mark.parametrize(  # test_every_engine.py has such clients unclipped
    "clip", [pytest.param({}, marks=pytest.mark.slow), {"gradient_clip_val": 0.1}], ids=["unclipped", "clipped"]
)
def test_engines_agree_with_batch_norm_dropout_and_options(fit, encoder, clip):
    def go(engine):
        return run(fit, 2, cohorts=COHORTS, engine=engine, encoder=encoder, data=Toy(batch_size=9))

    tight, full = go(SequentialEngine(cache_features=False, **clip)), go(TrainerEngine(**clip))
    assert_same(whole_state(full), whole_state(tight))
    assert full.validation_scores == tight.validation_scores


@pytest.mark.parametrize("method", [FedProto, FedGH])
def test_engines_agree_with_two_encoders(method):
    def go(engine):
        encoders = [tiny_encoder, linear_encoder]
        return run(partial(method, lr=0.05, epochs=1), 2, cohorts=COHORTS, engine=engine, encoder=encoders)

    tight, full = go(SequentialEngine(cache_features=False)), go(TrainerEngine())
    assert_same(whole_state(full), whole_state(tight))
    assert full.test_scores == tight.test_scores


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_options_are_not_idle(engine):
    plain = whole_state(run(FedAvg, engine=engine()))
    clipped = whole_state(run(FedAvg, engine=engine(gradient_clip_val=0.1)))
    assert not torch.equal(plain["client 0 head.weight"], clipped["client 0 head.weight"])


@pytest.mark.repeated
@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder, dropout_encoder])
@pytest.mark.parametrize(
    "fit",
    [partial(FedPAC, head_epochs=2), FedRep, partial(FedAvg, fine_tune="head"), partial(FedBABU, fine_tune="head")],
    ids=["FedPAC", "FedRep", "FedAvg-FT", "FedBABU"],
)
def test_features_computed_once_change_nothing(fit, encoder):
    def go(cache):
        return run(fit, 2, engine=SequentialEngine(cache_features=cache), encoder=encoder, data=Toy(batch_size=9))

    cached, fresh = go(True), go(False)
    assert_same(whole_state(cached), whole_state(fresh), atol=1e-6)
    for client, score in cached.test_scores.items():
        assert score.loss == pytest.approx(fresh.test_scores[client].loss, abs=1e-6)


def test_features_computed_once_save_passes():
    """With the cache the encoder sees each sample once where it is frozen: the case above compares two things."""
    rows = {}
    for cache in (True, False):
        seen = []

        def encoder(shape, seen=seen):
            module = tiny_encoder(shape)
            module.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
            return module

        run(partial(FedRep, head_epochs=10), encoder=encoder, engine=SequentialEngine(cache_features=cache))
        rows[cache] = sum(seen)
    sizes = [len(own) for own in Toy().labels]
    looks = sum(3 * min(16, size) for size in sizes)  # whether the encoder is as in evaluation mode
    assert rows[False] - rows[True] == 9 * sum(sizes) - looks  # ten epochs of the head against one pass


class _DataChange(torch.optim.SGD):
    """Published federated optimizers change ``p.data``, which autograd does not see."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad
        return None if closure is None else closure()


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.5, fused=True),
        partial(torch.optim.SGD, lr=0.5, foreach=False),
        partial(_DataChange, lr=0.5),
    ],
    ids=["fused", "one by one", "through data"],
)
def test_features_are_computed_anew_after_the_encoder_has_trained(optimizer):
    """Also after optimizers that change weights without telling autograd."""
    federation = run(partial(FedPAC, epochs=2, optimizer=optimizer), cohorts=[[0]])
    inputs, labels = Toy().tensors(0)
    with torch.no_grad():
        features = federation.client_model(0).encoder(inputs)
    for c in (0, 1):
        torch.testing.assert_close(federation.server.centroids[c], features[labels == c].mean(0), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- who trained before


class _Backwards(FederatedLoop):
    """The cohort, in descending order or after others."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def sample_cohort(self, round, num_clients, seed, max_rounds):
        return list(self.order)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("encoder", [dropout_encoder, normed_encoder])
def test_a_fit_does_not_depend_on_who_trained_before(engine, encoder):
    def go(order):
        fit = partial(FedRep, lr=0.05, epochs=1, fine_tune="all")
        torch.manual_seed(len(order) * 31 + order[0])
        options = {"loop": _Backwards(order), "encoder": encoder, "data": Toy(batch_size=9), "engine": engine()}
        return run(fit, 1, limit_val_batches=0, **options).personal

    alone, ascending, descending = go([2]), go([0, 1, 2, 3, 4]), go([4, 3, 2, 1, 0])
    for client in range(CLIENTS):
        assert_same(ascending.get(client), descending.get(client))
    assert_same(alone.get(2), ascending.get(2))
    assert not torch.equal(ascending.get(2)["head.weight"], ascending.get(1)["head.weight"])


def test_dropout_is_reproducible_and_follows_the_seed():
    def go(seed):
        return whole_state(run(FedAvg, encoder=dropout_encoder, seed=seed))

    first = go(1)
    torch.manual_seed(99)
    assert_same(go(1), first)
    assert not torch.equal(go(2)["client 0 head.weight"], first["client 0 head.weight"])
