"""Fine-tunings that fail before a vectorized evaluation."""

import gc
import math
import weakref
from functools import partial

import pytest
from _helpers.engines import assert_scores_agree, evaluate, trained
from _helpers.toy import CLIENTS, Toy, normed_encoder, run, tiny_encoder

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines.vectorized.stack import Member, Stack
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.methods import FedAvg, FedBABU, LGFedAvg

BAD = 2


def poisoned(at):
    """The toy data with a NaN in the training sample ``at`` of client 2."""
    first = sum(len(own) for own in Toy().labels[:BAD])

    def poison(inputs, targets):
        inputs[first + at] = math.nan

    return Toy(batch_size=9, change=poison)


@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder])
@pytest.mark.parametrize("fine_tune", ["head", "all"])
def test_a_client_whose_fine_tuning_diverges_is_evaluated_without_it(fine_tune, encoder):
    fit = partial(LGFedAvg, lr=0.02, fine_tune=fine_tune, fine_tune_epochs=2)
    federation = trained(fit, data=poisoned(3), encoder=encoder, cohorts=[[0, 1, 3]])
    got, expected = (evaluate(federation, engine) for engine in (VectorizedEngine(forward="vmap"), SequentialEngine()))
    assert_scores_agree(got, expected)
    assert [result.client for result in got if result.finetune_failures is not None] == [BAD]
    assert str(got[BAD].finetune_failures).startswith("client 2, round 1: the loss is nan at step ")
    federation.clients.models[0].fine_tune = None
    untuned = evaluate(federation, SequentialEngine(), [BAD])
    assert got[BAD].test.loss == pytest.approx(untuned[0].test.loss, abs=1e-5)


def test_the_user_is_warned_of_it():
    fit = partial(FedBABU, lr=0.02)
    with pytest.warns(UserWarning, match="evaluated without fine-tuning: client 2, round 1: the loss is nan at step"):
        run(fit, data=poisoned(0), cohorts=[[0, 1, 3]], engine=VectorizedEngine())


class Refuses(FedAvg):
    """Has no optimizer for a client that did not train."""

    def configure_optimizers(self):
        if self.phase.name == "fine_tune":
            raise ClientError(0, 0, "no optimizer")
        return super().configure_optimizers()


def test_a_client_error_before_the_first_step_is_each_clients_own(said):
    federation = trained(partial(Refuses, fine_tune="all"))
    got, expected = (evaluate(federation, engine) for engine in (VectorizedEngine(forward="vmap"), SequentialEngine()))
    assert_scores_agree(got, expected)
    assert all("no optimizer" in str(result.finetune_failures) for result in got)
    assert said() == []


def test_batches_of_one_sample_under_normalization_are_named(said):
    fit = partial(FedBABU, lr=0.01)
    federation = trained(fit, encoder=normed_encoder, data=Toy(batch_size=9))
    federation.data.batch_size = 8
    for engine in (VectorizedEngine(), SequentialEngine()):
        with pytest.raises(ConfigurationError, match="client 1, round 1: batch normalization cannot train on a batch"):
            evaluate(federation, engine)
    assert said() == []


def test_stacks_end_with_their_group(monkeypatch):
    """Without the garbage collector, and with a client whose fine-tuning fails."""
    federation = trained(partial(FedAvg, fine_tune="all"), data=poisoned(0), cohorts=[[0, 1, 3]])
    alive = []
    for kind in (Stack, Member):
        start = kind.__init__

        def counted(self, *args, start=start, **options):
            alive.append(weakref.ref(self))
            start(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", counted)
    gc.collect()
    gc.disable()
    try:
        results = evaluate(federation, VectorizedEngine(3, forward="vmap"))
        assert results[BAD].finetune_failures is not None
        assert len(alive) > CLIENTS
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()
