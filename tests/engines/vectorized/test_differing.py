"""Clients that differ in Python attributes, or use parameters and return terms in some steps only, are found."""

from functools import partial

import pytest
import torch
from _helpers.engines import assert_agree
from _helpers.toy import FEATURES, Toy, linear_encoder, tiny_encoder
from torch import nn

from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, python_state, refuse_changes
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods import FedAvg
from pfl_lightning.state.tensors import select_state

# ---------------------------------------------------------------------- Python attributes


class Scaled(FedAvg):
    """Multiplies the loss by what an attribute says."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale, self.options, self.seen = 1.0, {"scale": 1.0}, []

    def loss_terms(self, features, labels):
        factor = self.scale * self.options["scale"] * (1 + len(self.seen))
        return {"scaled": factor * super().loss_terms(features, labels)["cross_entropy"]}


class Assigns(Scaled):
    def before_fit(self, context):
        self.scale = 1.0 + 2 * (context.client % 2)  # of the last client as it was at first


class Fills(Scaled):
    def before_fit(self, context):
        self.options["scale"] = float(context.client)


class Appends(Scaled):
    def before_fit(self, context):
        if len(self.seen) < 2:
            self.seen.append(context.client)


class Late(Scaled):
    """Changes an attribute in the last steps only."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            self.scale = self.scale + 1
        return output


@pytest.mark.parametrize(
    ("method", "attribute"),
    [(Assigns, "scale"), (Fills, "options"), (Appends, "seen"), (Late, "scale")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_attributes_that_differ_are_found_and_restored(method, attribute):
    assert f"{method.__name__} changes the attribute {attribute!r}" in assert_agree(partial(method, lr=0.05))


class Counts(Scaled):
    """A new attribute, a counter and a set, by step."""

    def training_step(self, batch, batch_idx):
        self.count = getattr(self, "count", 0) + 1
        self.seen.append(batch_idx)
        self.kinds = getattr(self, "kinds", set()) | {batch_idx}
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * (1 + 0.01 * self.count + 0.01 * len(self.kinds))}


def test_attributes_of_a_first_try_are_taken_back():
    assert "Counts changes the attribute" in assert_agree(partial(Counts, lr=0.005))


@pytest.mark.parametrize(
    "change",
    [
        lambda client: vars(client).pop("scale"),
        lambda client: setattr(client, "other", 1),
        lambda client: client.seen.append(1),
        lambda client: client.encoder.insert(1, nn.Identity()),
        lambda client: setattr(client.encoder, "0", nn.Linear(6, FEATURES)),
    ],
    ids=["lost", "new", "filled", "layer", "replaced"],
)
def test_every_change_of_an_attribute_is_found(change):
    client = Scaled(tiny_encoder((6,)), 5)
    before = python_state(client)
    refuse_changes(client, before, "nothing")
    change(client)
    with pytest.raises(CannotVectorizeError, match="Scaled changes the attribute"):
        refuse_changes(client, before, "the change")


# ---------------------------------------------------------------------- steps that differ


class Alternates(FedAvg):
    """One head in even batches, and another in odd ones."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.spare = nn.Linear(FEATURES, 5)

    def training_step(self, batch, batch_idx):
        head = self.spare if batch_idx % 2 else self.head
        return {"loss": nn.functional.cross_entropy(head(self.encoder(batch[0])), batch[1])}


class Short(Alternates):
    """A second term, and its parameter, in whole batches only."""

    training_step = FedAvg.training_step

    def loss_terms(self, features, labels):
        terms = super().loss_terms(features, labels)
        if len(labels) == 4:
            terms["second"] = nn.functional.cross_entropy(self.spare(features), labels)
        return terms


class Terms(FedAvg):
    """A term in the first batch of an epoch only, of the same parameters."""

    def training_step(self, batch, batch_idx):
        terms = super().training_step(batch, batch_idx)
        return terms if batch_idx else {**terms, "first": terms["loss"]}


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Alternates, "uses the parameter 'head.bias' for some clients only"),
        (Short, "uses the parameter 'spare.bias' for some clients only"),
        (Terms, "returns the term 'first' in some steps only"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parameters_and_terms_of_some_clients_only(method, reason):
    """Client 1 has five batches an epoch and clients 2 and 3 have four, so that in time even and odd ones meet."""
    assert reason in assert_agree(partial(method, lr=0.05, momentum=0.9, weight_decay=0.1, epochs=3))


def test_a_parameter_of_every_second_step_of_all_clients_is_vectorized():
    data = Toy([[0, 1] * 4, [1, 2] * 4, [0, 2] * 4])
    assert assert_agree(partial(Alternates, weight_decay=0.1, epochs=3), cohorts=[range(3)], data=data) == ""


# ---------------------------------------------------------------------- settings of the optimizer


class OwnRate(FedAvg):
    """Has the learning rate in a buffer, as the page on own methods says of what differs between clients."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("rate", torch.tensor(0.1), persistent=False)

    def before_fit(self, context):
        self.rate = torch.tensor(0.01 * (1 + context.client))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=float(self.rate))


class OwnSchedule(OwnRate):
    """The same rate for all, and a decay that differs."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1 - float(self.rate))]


class SameRate(OwnRate):
    """Its own optimizer, with the same settings for all."""

    def before_fit(self, context):
        return None


@pytest.mark.parametrize("method", [OwnRate, OwnSchedule, SameRate])
def test_clients_with_settings_of_their_own_stay_together(method):
    assert not assert_agree(partial(method, epochs=2))


# ---------------------------------------------------------------------- further outputs


class Logits(FedAvg):
    """Returns its scores beside the loss, which nobody logs."""

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "scores": scores.detach()}


def test_tensors_beside_the_loss_are_left_out():
    assert not assert_agree(partial(Logits, epochs=1))


# ---------------------------------------------------------------------- updates


class View(FedAvg):
    """Sends its weights themselves, without a copy."""

    def make_update(self, context, before):
        weights = select_state(self, self.shared_names(), clone=False)
        context_of = {"client": context.client, "round": context.round, "num_samples": context.data.num_samples}
        return ClientUpdate(**context_of, weights=weights)


class ViewOfHead(View):
    shared = ("head.*",)


def test_an_update_that_is_a_view_stays_with_clients_of_two_architectures():
    assert not assert_agree(partial(ViewOfHead, epochs=1), rounds=2, encoder=[tiny_encoder, linear_encoder])
