"""Public samples: held back from the training samples, or read from a folder; alike for everybody in a round."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
import torch
from _helpers.toy import Toy, for_toy, run
from PIL import Image

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.datamodules import IID, ClientSplit, FederatedDataModule, ImageFolder, Samples
from pfl_lightning.datamodules.clients.samples import with_public
from pfl_lightning.engines.vectorized.phase import StackedBatches
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.public import HELD, PublicSamples, _inputs, public_positions
from pfl_lightning.methods import KTpFL


class Pictures(FederatedDataModule):
    """Forty pictures that differ in their first pixel, with a test set."""

    def load(self):
        images = torch.zeros(40, 3, 4, 4, dtype=torch.uint8)
        images[:, 0, 0, 0] = torch.arange(40)
        labels = torch.arange(40) % 4
        return Samples(images, labels, tuple("abcd"), images[:8] + 100, labels[:8])


def ready(**options):
    data = Pictures(IID(3), 5, validation_share=0.2, **options)
    data.setup()
    return data


def held_by(split):
    return set(split.raw_inputs[:, 0, 0, 0].tolist())


@pytest.mark.parametrize(("public", "count"), [(10, 10), (0.25, 10), (1, 1)])
def test_samples_held_back_are_no_clients(public, count):
    data = ready(public=public)
    own = held_by(data.public_split)
    assert len(own) == len(data.public_split) == count
    for client in range(3):
        parts = data.client_data(client)
        assert not own & (held_by(parts.train) | held_by(parts.validation))
    held = [held_by(getattr(data.client_data(k), part)) for k in range(3) for part in ("train", "validation")]
    assert len(set.union(*held)) == 40 - count
    assert data.public_split.targets.tolist() == [-1] * count  # without labels


def test_they_are_normalized_as_the_clients_and_never_augmented():
    data = ready(public=10, augment=True)
    whole = data.public_split
    inputs, _ = whole.loader(10).tensors()
    assert torch.equal(inputs, data.transform.normalize(whole.raw_inputs))
    assert not whole.loader(10, augment=True, generator=torch.Generator()).augmented


def test_they_are_part_of_the_fingerprint():
    plain, ten, again, others = ready(), ready(public=10), ready(public=10), ready(public=10, seed=1)
    assert ten.fingerprint == again.fingerprint
    assert plain.data_fingerprint != ten.data_fingerprint == again.data_fingerprint != others.data_fingerprint
    assert len({plain.fingerprint, ten.fingerprint, others.fingerprint, ready(public=11).fingerprint}) == 4
    assert plain.public_split is None
    assert "public" not in plain.fingerprint


def write_images(folder, side=4, count=3):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((side, side, 3), number, dtype=np.uint8)).save(folder / f"{number}.png")


def test_a_folder_of_images(tmp_path):
    write_images(tmp_path / "flat")
    assert len(ready(public=str(tmp_path / "flat")).public_split) == 3
    write_images(tmp_path / "classes" / "other", count=2)
    write_images(tmp_path / "classes" / "further")
    data = ready(public=str(tmp_path / "classes"))
    assert len(data.public_split) == 5  # of whatever classes: they have no labels here
    assert len(data.client_data(0).train) == len(ready().client_data(0).train)


def test_images_of_a_folder_and_of_its_subfolders(tmp_path):
    (tmp_path / "sub").mkdir()
    for place, name in enumerate(("one.png", "sub/two.png", "three.png")):
        Image.fromarray(np.full((4, 4, 3), place, dtype=np.uint8)).save(tmp_path / name)
    assert sorted(held_by(ready(public=str(tmp_path)).public_split)) == [0, 1, 2]


def test_a_path_whose_images_are_scaled_as_the_clients(tmp_path):
    for part in ("train", "test"):
        for name in ("a", "b"):
            write_images(tmp_path / part / name, side=6, count=4)
    write_images(tmp_path / "public", side=8)
    options = {"root": str(tmp_path), "image_size": 4, "cache_dir": str(tmp_path / "cache")}
    data = ImageFolder(IID(2), 2, public=tmp_path / "public", **options)
    data.setup()
    assert data.public_split.raw_inputs.shape == (3, 3, 4, 4)


class GrayPictures(Pictures):
    """The same in one channel."""

    def load(self):
        samples = super().load()
        return replace(samples, train_inputs=samples.train_inputs[:, :1], test_inputs=samples.test_inputs[:, :1])


@pytest.mark.parametrize("of_files", ["L", "RGB"])
@pytest.mark.parametrize("pictures", [GrayPictures, Pictures])
def test_a_folders_images_get_the_clients_channels(tmp_path, of_files, pictures):
    """By Pillow's conversion, whatever the files have; each picture by itself."""
    rng = np.random.default_rng(0)
    held = [Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).convert(of_files) for _ in range(3)]
    for number, image in enumerate(held):
        image.save(tmp_path / f"{number}.png")
    data = pictures(IID(3), 5, public=str(tmp_path))
    data.setup()
    mode, channels = ("L", 1) if pictures is GrayPictures else ("RGB", 3)
    expected = np.stack([np.asarray(image.convert(mode)).reshape(4, 4, channels) for image in held])
    assert np.array_equal(data.public_split.raw_inputs.permute(0, 2, 3, 1).numpy(), expected)
    inputs, _ = data.public_split.loader(3).tensors()
    assert inputs.shape[1:] == data.client_data(0).train.loader(3).tensors()[0].shape[1:]


def test_public_images_of_another_size_are_refused(tmp_path):
    write_images(tmp_path / "large", side=8)
    for pictures in (Pictures, GrayPictures):
        with pytest.raises(
            ValueError, match=r"of shape \(\d, 4, 4\), public inputs .* of shape \(\d, 8, 8\): both must"
        ):
            pictures(IID(3), 5, public=str(tmp_path / "large")).setup()
    with pytest.raises(FileNotFoundError, match=r"no public images in .*nowhere"):
        ready(public=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "inputs", [torch.zeros(6, 4, 8, 8, dtype=torch.uint8), torch.zeros(6, 3, 8, 8), torch.zeros(6, 5)]
)
def test_a_folder_for_clients_without_such_images_is_refused(tmp_path, inputs):
    write_images(tmp_path / "some", side=8)
    samples = Samples(inputs, torch.zeros(6, dtype=torch.int64), ("a",))
    said = (
        "public images in .*some' need clients' samples .* one or three channels.*set 'public' to a number of training"
    )
    with pytest.raises(ValueError, match=said):
        with_public(samples, tmp_path / "some", seed=0)


def test_public_samples_of_another_shape_are_refused():
    images = torch.zeros(4, 3, 2, 2)
    with pytest.raises(ValueError, match=r"public inputs torch\.float32 of shape"):
        Samples(images, torch.zeros(4, dtype=torch.int64), ("a",), public_inputs=torch.zeros(2, 3, 2, 1))


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (torch.tensor([0, 5]), "public targets .*5"),
        (torch.tensor([0, -1]), "public targets .*-1"),
        (
            torch.tensor([0]),
            r"public targets must be int64, one class for each sample, got torch.int64 of shape \(1,\) for 2",
        ),
        (torch.tensor([0.0, 1.0]), r"public targets must be int64, .*got torch\.float32"),
    ],
    ids=["a class more", "none", "too few", "no integers"],
)
def test_public_samples_of_other_classes_are_refused(classes, said):
    """FedMD may begin by them."""
    images, labels = torch.zeros(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=said):
        Samples(images, labels, ("a", "b"), public_inputs=images[:2], public_targets=classes)


def test_public_samples_without_a_meaning_are_refused():
    """All clients would be left out of the rounds that draw one."""
    public = torch.zeros(4, 3)
    public[1, 2], public[3] = float("nan"), float("inf")
    with pytest.raises(ValueError, match="2 of 4 public samples hold NaN or infinite numbers: leave them out"):
        Samples(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), ("a",), public_inputs=public)


@pytest.mark.parametrize("public", [float("nan"), 0, 40, 1.0, -3, 0.001, True])
def test_numbers_that_leave_nothing_are_refused(public):
    with pytest.raises(ValueError, match="public must be a number of the 40 training samples, from 1 to 39"):
        with_public(Pictures(IID(2)).load(), public, seed=0)


def test_a_rounds_samples_are_the_same_for_all():
    data = ready(public=20)
    first, second = (
        PublicSamples(data.public_split, 6, 3, FitData(data.client_data(k).train, 5, True, True, 2)) for k in (0, 1)
    )
    for round in range(3):
        own, other = first.of_round(round), second.of_round(round)
        assert torch.equal(own.tensors()[0], other.tensors()[0])
        assert torch.equal(own.part.raw_inputs, data.public_split.raw_inputs[public_positions(20, 6, 3, round)])
        assert own is first.of_round(round)
        assert (own.drop_last, own.augment, own.views, own.num_samples) == (False, False, 1, 6)
    assert not torch.equal(public_positions(20, 6, 3, 0), public_positions(20, 6, 3, 1))
    own.attach(torch.zeros(6))
    assert other.values is None


def test_their_inputs_are_held_once_for_all_clients():
    data = ready(public=20)
    drawn = [
        PublicSamples(data.public_split, 6, 3, FitData(data.client_data(client).train, 5)).of_round(round)
        for round in range(4)
        for client in (0, 1, 2)
    ]
    held = [own.tensors()[0].data_ptr() for own in drawn]
    assert [len(set(held[3 * round : 3 * round + 3])) for round in range(4)] == [1, 1, 1, 1]
    assert len(set(held)) == 4
    (inputs,) = {id(own.for_phase(2, True).loader(torch.Generator()).tensors()[0]) for own in drawn[:3]}
    assert inputs == id(drawn[0].tensors()[0])  # those of the batches, too
    assert len(_inputs[data.public_split]) == HELD  # and of two rounds alone
    other = PublicSamples(data.public_split, 6, 4, FitData(data.client_data(0).train, 5)).of_round(3)
    assert not torch.equal(other.tensors()[0], drawn[-1].tensors()[0])  # of another run


class CountedReads(ClientSplit):
    """Counts how often samples are gathered."""

    count = 0

    def inputs_on(self, device):
        CountedReads.count += 1
        return super().inputs_on(device)


class CountedToy(Toy):
    """Whose public samples are counted."""

    @cached_property
    def public_split(self):
        split = super().public_split
        return CountedReads(split._inputs, split._targets, split.indices, split.transform)


@pytest.mark.parametrize(
    ("engine", "pool"), [(SequentialEngine(), 0), (VectorizedEngine(forward="vmap"), 1)], ids=["sequential", "vmap"]
)
def test_they_are_read_once_a_round_whatever_the_number_of_clients(engine, pool, monkeypatch):
    CountedReads.count, sizes, make = 0, [], StackedBatches.__init__

    def noted(self, streams, *args, **options):
        make(self, streams, *args, **options)
        if self._pool is not None and len(self._pool) == 3:  # with targets: the public samples
            sizes.append(([len(column) for column in self._pool], len(streams)))

    monkeypatch.setattr(StackedBatches, "__init__", noted)
    cohorts = [range(5)] * 3
    run(for_toy(KTpFL, lr=0.05, epochs=1), 3, cohorts=cohorts, data=CountedToy(), engine=engine, limit_val_batches=0)
    assert CountedReads.count == 3  # S_1, S_2 and S_3: what is said in round 0 is of S_1
    for (inputs, labels, targets), clients in sizes:  # the stack holds them once, too
        assert labels == targets == clients * inputs
    assert len(sizes) == 2 * pool
