"""Values attached to samples reach training_step with them, under every engine, in every order."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.process_helpers import forked_process_engine
from _helpers.toy import Toy, assert_same, dropout_encoder, run, tiny_encoder, whole_state
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.datamodules import Augmentation
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import FedAvg

COHORTS = [[0, 2, 3], [1, 2, 4]]


def weight_of(inputs):
    """A weight for each sample, which its inputs tell: (n, 2)."""
    return torch.stack([inputs[:, 0].abs(), inputs[:, 1] ** 2], dim=1)


class Attached(FedAvg):
    """A loss weighted by attached values, in two phases."""

    def phases(self):
        return (Phase("one", epochs=2), Phase("two", epochs=1, batch_size=3))

    def before_fit(self, context):
        context.data.attach(weight_of(context.data.tensors()[0]))

    def training_step(self, batch, batch_idx):
        inputs, labels, values = batch
        losses = F.cross_entropy(self(inputs), labels, reduction="none")
        return self.sum_of_terms({"cross_entropy": (losses * values.sum(1)).mean()})


class Computed(Attached):
    """The same loss, with weights computed in the step."""

    def before_fit(self, context):
        pass

    def training_step(self, batch, batch_idx):
        return super().training_step((*batch, weight_of(batch[0])), batch_idx)


class Ignored(FedAvg):
    """FedAvg with values that nothing reads."""

    def before_fit(self, context):
        context.data.attach(torch.arange(context.data.num_samples))


ENGINES = {
    "sequential": (lambda patch: SequentialEngine(), 0.0),
    "trainer": (lambda patch: TrainerEngine(), 0.0),
    "vmap": (lambda patch: VectorizedEngine(forward="vmap"), 1e-5),
    "ray": (lambda patch: fake_ray_engine(patch, 2)[0], 0.0),
    "processes": (lambda patch: forked_process_engine(patch, 2), 0.0),
}


@pytest.mark.parametrize(("make", "atol"), ENGINES.values(), ids=ENGINES)
def test_a_step_on_attached_values_is_one_that_computes_them(make, atol, monkeypatch):
    options = {"lr": 0.01}
    got = run(partial(Attached, **options), 2, cohorts=COHORTS, engine=make(monkeypatch))
    expected = run(partial(Computed, **options), 2, cohorts=COHORTS)
    assert_same(whole_state(got), whole_state(expected), atol=atol)
    assert not getattr(got.engine, "_warned", None)


@pytest.mark.parametrize("encoder", [tiny_encoder, dropout_encoder])
def test_the_default_step_ignores_values_bit_by_bit(encoder):
    options = {"lr": 0.05, "epochs": 2, "fine_tune": "head"}
    got = run(partial(Ignored, **options), 2, cohorts=COHORTS, encoder=encoder)
    assert_same(whole_state(got), whole_state(run(partial(FedAvg, **options), 2, cohorts=COHORTS, encoder=encoder)))


class Shift(Augmentation):
    """A draw for every sample."""

    def __call__(self, images, generator=None):
        return images + torch.randn(images.shape, generator=generator)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_values_follow_their_samples_in_every_view(views, augment, drop_last):
    data = Toy()
    data.setup()
    fit = FitData(data.client_data(1).train.with_augmentations((Shift(),)), 4, drop_last, augment, views)
    plain = [batch[:2] for batch in fit.loader(torch.Generator().manual_seed(3))]
    fit.attach(torch.stack([fit.tensors()[1], torch.arange(fit.num_samples)], dim=1))
    with_values = list(fit.for_phase(4).loader(torch.Generator().manual_seed(3)))
    positions = list(fit.positions(torch.Generator().manual_seed(3)))
    for (inputs, labels), (same_inputs, same_labels, values), index in zip(plain, with_values, positions, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(labels, same_labels)
        assert torch.equal(values[:, 0], labels)
        if not augment:
            assert torch.equal(values[:, 1], index if views == 1 else index[:, 0])


def test_plain_batches_of_labeled_samples_keep_their_values():
    data = Toy()
    data.setup()
    own = data.client_data(0)
    both = replace(own, unlabeled=data.client_data(1).validation).train_and_unlabeled
    fit = FitData(both, 4, labeled=own.train)
    fit.attach(torch.arange(fit.num_samples))
    plain = fit.for_phase(plain=True)
    assert plain.num_samples == len(own.train) < fit.num_samples
    assert plain.values.tolist() == list(range(len(own.train)))


def test_wrong_numbers_of_values_are_refused():
    data = Toy()
    data.setup()
    fit = FitData(data.client_data(0).train, 4)
    with pytest.raises(
        ConfigurationError, match=r"one value for each of the 11 samples can be attached, got .*\(3, 2\)"
    ):
        fit.attach(torch.zeros(3, 2))
    assert fit.values is None
