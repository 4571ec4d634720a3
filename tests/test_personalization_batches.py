"""The batches of a personalization, its precision, who goes together, and what is left when it fails."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import (
    CLIENTS,
    LABELS,
    Toy,
    assert_same,
    for_toy,
    normed_encoder,
    own_model,
    quiet_trainer,
    run,
    whole_state,
)
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.datamodules import Augmentation, RandomFlip
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.personalization import LinearProbe
from pfl_lightning.methods import PFLSSL, DualFed, FedAvg
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import derive_seed, seeded_generator, torch_seed

SEED = 11
FIT = partial(FedAvg, lr=0.05, epochs=1)


def personalize(federation, settings, data, engine=None):
    federation.engine = engine or SequentialEngine()
    with federation.personalized(settings):
        quiet_trainer(1).test(federation, data, verbose=False)
    return dict(federation.test_scores)


def trained(data, **options):
    return run(FIT, 1, data=data, encoder=normed_encoder, **options)


def plain_fine_tuning(federation, client, settings, data, head=None, change=lambda inputs: inputs):
    """Test loss after training everything, in batches of which a last one of a single sample is left out."""
    net = copy.deepcopy(own_model(federation, client)).train()
    if head is not None:
        net.head.load_state_dict(head)
    inputs, targets = data.tensors(client)
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), settings.lr, momentum=settings.momentum)
    generator = seeded_generator(SEED, "personalize/0", federation.round, client)
    sizes = []
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(targets), generator=generator).split(settings.batch_size):
            sizes.append(len(rows))
            if len(rows) == 1:
                continue
            optimizer.zero_grad()
            F.cross_entropy(net.head(net.encoder(change(inputs[rows]))), targets[rows]).backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        x, y = data.tensors(client, "test")
        return float(F.cross_entropy(net.head(net.encoder(x)), y)), sizes


ENGINES = {
    "SequentialEngine": lambda patch: SequentialEngine(),
    "TrainerEngine": lambda patch: TrainerEngine(),
    "VectorizedEngine": lambda patch: VectorizedEngine(forward="vmap"),
    "RayEngine": lambda patch: fake_ray_engine(patch, 2)[0],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_last_batch_of_one_sample_is_left_out_where_batch_normalization_trains(engine, drop_last, monkeypatch):
    """Client 1, of 17 samples, leaves one; drop_last of the data module changes nothing."""
    data = partial(Toy, batch_size=7 if drop_last else 9, drop_last=drop_last)
    federation = trained(data())
    settings = Personalization("all", epochs=3, lr=0.05, batch_size=4)
    expected, sizes = zip(
        *(plain_fine_tuning(federation, client, settings, data()) for client in range(CLIENTS)), strict=True
    )
    assert [1 in own for own in sizes] == [False, True, False, False, False]
    scores = personalize(federation, settings, data(), ENGINES[engine](monkeypatch))
    assert [score.loss for score in scores.values()] == pytest.approx(expected, abs=1e-5)


class Mirror(Augmentation):
    """Every image from right to left: draws nothing, so that it can be restated."""

    def __call__(self, images, generator=None):
        return images.flip(-1)


class Images(Toy):
    """The samples as images of 2 x 3 pixels, which the training augments in another way than is usual."""

    augmentations = (Mirror(),)

    def load(self):
        samples = super().load()
        parts = (part.reshape(-1, 1, 2, 3) for part in (samples.train_inputs, samples.test_inputs))
        return replace(samples, **dict(zip(("train_inputs", "test_inputs"), parts, strict=True)))


def flat_encoder(input_shape):
    encoder = torch.nn.Sequential(torch.nn.Flatten(), *normed_encoder((6,)))
    encoder.out_features = 4
    return encoder


@pytest.mark.repeated
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("augment", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("method", [FedAvg, partial(DualFed, contrastive=1.0)], ids=["FedAvg", "DualFed"])
def test_a_new_head_with_its_encoder(method, augment, engine, monkeypatch):
    """As in the published code of Calibre; under DualFed a classifier trains last, and the encoder was frozen."""
    data = partial(Images, batch_size=9, augment=[RandomFlip()])
    federation = run(partial(method, lr=0.01, epochs=1), 1, data=data(), encoder=flat_encoder)
    settings = Personalization("linear+encoder", epochs=3, lr=0.05, batch_size=4, augment=augment)
    encoder = flat_encoder(())
    with torch_seed(derive_seed(SEED, "personalize/head")):
        head = LinearProbe(encoder, 5).head.state_dict()
    change = Mirror() if augment else (lambda inputs: inputs)
    expected = [plain_fine_tuning(federation, client, settings, data(), head, change)[0] for client in range(CLIENTS)]
    before = whole_state(federation)
    scores = personalize(federation, settings, data(), ENGINES[engine](monkeypatch))
    assert [score.loss for score in scores.values()] == pytest.approx(expected, abs=1e-5)
    assert_same(whole_state(federation), before)


def test_augmentation_of_what_are_no_images_is_refused():
    federation = trained(Toy(batch_size=9))
    with pytest.raises(ConfigurationError, match=r"personalize\.augment: Toy has no default crops and flips"):
        personalize(federation, Personalization("all", augment=True), Toy(batch_size=9))


@pytest.mark.parametrize("train", ["linear", "linear+encoder", "all"])
def test_a_self_supervised_encoder_is_personalized_on_single_views(train):
    data = partial(Images, batch_size=9, augment=[RandomFlip()])
    federation = run(for_toy(PFLSSL, lr=0.01, epochs=1), 1, data=data(), encoder=flat_encoder)
    settings = Personalization(train, epochs=40, lr=0.05)
    scores = personalize(federation, settings, data())
    assert sum(score.accuracy for score in scores.values()) / CLIENTS > 0.7


def test_a_client_with_one_sample_is_evaluated_as_it_is():
    labels = [[0], *LABELS[1:]]
    federation = trained(Toy(batch_size=9), cohorts=[[1, 2]])
    quiet_trainer(1).test(federation, Toy(labels, batch_size=9), verbose=False)
    untuned = dict(federation.test_scores)
    settings = Personalization("all", epochs=1, lr=0.5, batch_size=4)
    message = r"without fine-tuning: client 0, round 1: batch normalization cannot train .* which 1 training item in"
    for engine in (SequentialEngine(), VectorizedEngine(forward="vmap")):
        with pytest.warns(UserWarning, match=message):
            scores = personalize(federation, settings, Toy(labels, batch_size=9), engine)
        assert scores[0].loss == pytest.approx(untuned[0].loss)
        assert all(scores[client].loss != pytest.approx(untuned[client].loss) for client in range(1, CLIENTS))


def test_batches_of_one_sample_are_refused_with_an_advice_that_helps():
    federation = trained(Toy(batch_size=7, drop_last=True))
    with pytest.raises(ConfigurationError, match="in batches of 1 leave; set another batch_size"):
        personalize(federation, Personalization("all", batch_size=1), Toy(batch_size=7, drop_last=True))


@pytest.mark.parametrize("batch_size", [6, 7])
def test_drop_last_of_the_data_module_does_not_count(batch_size):
    """Nor where the batches of the training happen to have the same size."""
    settings = Personalization("head", epochs=3, lr=0.1, batch_size=batch_size)
    federation = run(FIT, 1, data=Toy(batch_size=7))
    whole = personalize(federation, settings, Toy(batch_size=7))
    assert personalize(federation, settings, Toy(batch_size=7, drop_last=True)) == whole


def test_equal_settings_give_equal_phases():
    assert Personalization().phase(("head.*",)) == Personalization().phase(("head.*",))
    assert Personalization().phase(("head.*",)) != Personalization(lr=0.1).phase(("head.*",))
    assert isinstance(Personalization().phase(("head.*",)), Phase)


def test_clients_are_personalized_together_by_the_vectorized_engine():
    together = []

    class Watched(VectorizedEngine):
        def train_stack(self, client, stack, *args):
            together.append(len(stack.members))
            super().train_stack(client, stack, *args)

    federation = run(FIT, 1)
    personalize(federation, Personalization(epochs=2, batch_size=6), Toy(), Watched(forward="vmap"))
    assert together == [CLIENTS]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_new_head_has_the_precision_of_the_encoder(precision, engine, monkeypatch):
    settings = Personalization(epochs=2, lr=0.05, batch_size=6)
    expected = personalize(run(FIT, 1), settings, Toy())
    federation = run(FIT, 1, precision=precision)
    federation.engine = ENGINES[engine](monkeypatch)
    with federation.personalized(settings):
        quiet_trainer(1, precision=precision).test(federation, Toy(), verbose=False)
    found = [score.loss for score in federation.test_scores.values()]
    assert found == pytest.approx([score.loss for score in expected.values()], rel=1e-5 if "64" in precision else 0.02)


@pytest.mark.parametrize("train", ["linear", "all"])
def test_nothing_is_left_of_a_stage_whose_engine_does_not_start(train):
    class Fails(SequentialEngine):
        def start(self, models, data, environment):
            raise ConnectionError("no workers")

    federation = run(FIT, 1)
    before = dict(federation.test_scores)
    with pytest.raises(ConnectionError):
        personalize(federation, Personalization(train), Toy(), Fails())
    assert federation.clients.models[0].personalization is None
    federation.engine = SequentialEngine()
    quiet_trainer(1).test(federation, Toy(), verbose=False)
    assert federation.test_scores == before
