"""Clients of a group do not affect one another, and nothing outlives the group."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from _helpers.engines import assert_agree
from _helpers.toy import CLIENTS, Toy, normed_encoder, run
from torch import nn

from pfl_lightning import VectorizedEngine
from pfl_lightning.engines.vectorized.limits import uses_batch_index
from pfl_lightning.engines.vectorized.phase import StackedBatches, Stream
from pfl_lightning.engines.vectorized.stack import Stack
from pfl_lightning.methods import FedAvg, FedBN, FedPAC

# ---------------------------------------------------------------------- after the training


class ChangesModes(FedBN):
    """Updates statistics in training mode, then leaves evaluation mode behind."""

    def make_update(self, context, before):
        with torch.no_grad():
            self(context.data.tensors()[0])
        self.eval()
        return super().make_update(context, before)


class Freezes(FedAvg):
    """Takes a step of its own, twice as far where the head was frozen, and freezes the head."""

    def make_update(self, context, before):
        inputs, labels = context.data.tensors()
        frozen = not self.head.weight.requires_grad
        with torch.enable_grad():
            gradient = torch.autograd.grad(
                self.loss_terms(self.encoder(inputs), labels)["cross_entropy"], self.head.bias
            )
        with torch.no_grad():
            self.head.bias.sub_(gradient[0] * (1 + frozen))
        self.head.weight.requires_grad_(False)
        return super().make_update(context, before)


def test_what_make_update_does_to_the_module_ends_with_the_client():
    options = {"precision": "32-true", "data": Toy(batch_size=11), "encoder": normed_encoder}
    assert assert_agree(partial(ChangesModes, lr=0.005, epochs=1), cohorts=[[0, 2, 3]], **options) == ""


def test_what_make_update_does_to_parameters_ends_with_the_client():
    assert assert_agree(partial(Freezes, lr=0.05), precision="32-true") == ""


class WithoutPhases(ChangesModes):
    def phases(self):
        return ()


def test_clients_without_phases_conclude_in_training_mode():
    options = {"precision": "32-true", "encoder": normed_encoder}
    assert assert_agree(WithoutPhases, **options) == ""


class ReturnsBuffer(FedAvg):
    """Keeps, and returns from before_fit, a non-persistent buffer that every client writes into."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("own", torch.zeros(3), persistent=False)

    def before_fit(self, context):
        self.own.fill_(float(context.client))
        return self.own

    def make_update(self, context, before):
        with torch.no_grad():
            self.head.bias.add_(before.mean())
        return super().make_update(context, before)


def test_what_before_fit_returned_stays_as_it_was():
    assert assert_agree(ReturnsBuffer) == ""


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("method", [FedPAC, partial(FedAvg, lr=0.05)], ids=["FedPAC", "FedAvg"])
def test_stacks_and_pools_end_with_their_group(method, monkeypatch):
    """Without the garbage collector, and with a client that fails."""
    alive = []
    for kind in (Stack, StackedBatches, Stream):
        start = kind.__init__

        def counted(self, *args, start=start, **options):
            alive.append(weakref.ref(self))
            start(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", counted)

    def poison(inputs, targets):
        inputs[12] = math.nan  # client 1

    gc.disable()
    try:
        with pytest.warns(UserWarning, match="left out of the aggregation"):
            run(method, 1, data=Toy(change=poison), engine=VectorizedEngine(2, forward="vmap"))
        assert len(alive) > CLIENTS
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


# ---------------------------------------------------------------------- optimizers, batch numbers


class NamesLayers(FedPAC):
    """A rate for the first layer, which the encoder has only as long as nothing else takes its place."""

    def configure_optimizers(self):
        first = list(self.encoder[0].parameters())
        rest = [p for p in self.parameters() if not any(p is own for own in first)]
        return torch.optim.SGD([{"params": first, "lr": 0.01}, {"params": rest}], lr=0.02)


def test_optimizers_are_configured_on_the_whole_client():
    assert assert_agree(NamesLayers, 2) == ""


def test_what_looks_at_the_number_of_a_batch():
    class Copies(FedAvg):
        def training_step(self, batch, batch_idx):
            number = batch_idx
            return number, number

    class Ignores(FedAvg):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, 0)

    class Callable(FedAvg):
        training_step = partial(FedAvg.training_step)

    encoder = nn.Linear(4, 4)
    encoder.out_features = 4
    assert uses_batch_index(Copies(encoder, 3))
    assert not uses_batch_index(Ignores(encoder, 3))
    assert uses_batch_index(Callable(encoder, 3))
