"""STL-10's binary files, against torchvision's reader, on a small archive of the same format."""

import numpy as np
import pytest
import torch
import torchvision
from _helpers.stl10_archive import NAMES, write_stl10
from PIL import Image

from pfl_lightning.datamodules import IID, STL10


@pytest.fixture
def folder(tmp_path):
    return write_stl10(tmp_path)


def load(folder, **options):
    return STL10(IID(2), root=str(folder.parent), **options).load()


def torchvisions(monkeypatch, folder, split):
    """Data as read by torchvision, without its checksums."""
    monkeypatch.setattr(torchvision.datasets.STL10, "_check_integrity", lambda self: True)
    return torchvision.datasets.STL10(str(folder.parent), split=split)


def test_images_and_classes_are_those_of_torchvision(folder, monkeypatch):
    samples = load(folder)
    train, test, further = (torchvisions(monkeypatch, folder, split) for split in ("train", "test", "unlabeled"))
    assert torch.equal(samples.train_inputs, torch.from_numpy(train.data))
    assert torch.equal(samples.test_inputs, torch.from_numpy(test.data))
    assert torch.equal(samples.unlabeled_inputs, torch.from_numpy(further.data))
    assert samples.train_targets.tolist() == train.labels.tolist()
    assert samples.test_targets.tolist() == test.labels.tolist()
    assert list(samples.class_names) == train.classes == NAMES
    assert samples.train_inputs.shape == (40, 3, 96, 96)
    assert samples.train_inputs.dtype == samples.unlabeled_inputs.dtype == torch.uint8


def test_the_folder_itself_may_be_named(folder):
    samples = STL10(IID(2), root=str(folder)).load()
    assert list(samples.class_names) == NAMES


def test_images_of_another_size(folder):
    whole, small = load(folder), load(folder, image_size=32)
    for name in ("train_inputs", "test_inputs", "unlabeled_inputs"):
        images, resized = getattr(whole, name), getattr(small, name)
        assert resized.shape == (len(images), 3, 32, 32)
        assert resized.dtype == torch.uint8
        for image, found in zip(images[:3], resized, strict=False):
            picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
            expected = np.asarray(picture.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
            assert np.abs(found.permute(1, 2, 0).numpy() - expected).max() <= 1
    assert torch.equal(load(folder, image_size=96).unlabeled_inputs, whole.unlabeled_inputs)


@pytest.mark.parametrize(("asked", "count"), [(None, 30), (7, 7), (0.5, 15), (1.0, 30), (1, 1), (30, 30)])
@pytest.mark.parametrize("image_size", [None, 8])
def test_some_of_the_images_without_labels(folder, asked, count, image_size):
    found = load(folder, unlabeled=asked, image_size=image_size).unlabeled_inputs
    assert torch.equal(found, load(folder, image_size=image_size).unlabeled_inputs[:count])
    assert len(found) == count


@pytest.mark.parametrize("none", [0, 0.0])
def test_without_them_their_file_is_not_needed(folder, none):
    (folder / "unlabeled_X.bin").unlink()
    assert load(folder, unlabeled=none).unlabeled_inputs is None


def test_the_file_is_not_changed_through_the_images(folder):
    before = (folder / "unlabeled_X.bin").read_bytes()
    load(folder).unlabeled_inputs.zero_()
    assert (folder / "unlabeled_X.bin").read_bytes() == before


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


DAMAGES = {
    "a file is missing": (lambda f: (f / "test_y.bin").unlink(), FileNotFoundError, "test_y.bin"),
    "no unlabeled images": (lambda f: (f / "unlabeled_X.bin").unlink(), FileNotFoundError, "unlabeled_X.bin"),
    "cut within an image": (
        lambda f: cut(f / "unlabeled_X.bin", 3 * 27648 - 5),
        ValueError,
        "unlabeled_X.bin is damaged: expected images of 27648 bytes, got 2 and 27643 bytes; download it again",
    ),
    "cut between images": (
        lambda f: cut(f / "train_X.bin", 30 * 27648),
        ValueError,
        "train_y.bin must have a class from 1 to 10 for each of 30 images",
    ),
    "empty": (lambda f: cut(f / "unlabeled_X.bin", 0), ValueError, "unlabeled_X.bin is damaged"),
    "not classes": (
        lambda f: (f / "train_y.bin").write_bytes(bytes(range(40))),
        ValueError,
        "train_y.bin must have a class from 1 to 10 for each of 40",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message):
        load(folder)


def test_no_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no STL10 under .*STL10\(.*download=True\).*set 'root' to where it is"
    ):
        STL10(IID(2), root=str(tmp_path / "nowhere")).load()


@pytest.mark.parametrize("wrong", [-1, -0.5, True, "all", float("nan")])
def test_what_is_no_number_of_images(wrong):
    with pytest.raises(ValueError, match="unlabeled must be a finite number of at least 0"):
        STL10(IID(2), unlabeled=wrong)


def test_more_images_than_there_are(folder):
    for asked in (31, 1.5):
        with pytest.raises(ValueError, match=f"unlabeled is {asked}, the file has 30 images"):
            load(folder, unlabeled=asked)


def test_an_image_needs_pixels():
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        STL10(IID(2), image_size=0)
