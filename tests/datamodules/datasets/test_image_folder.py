"""Folders of images: their order, their cache, and what is said when something is wrong with them."""

import logging
import os

import numpy as np
import pytest
import torch
from PIL import Image

from pfl_lightning.datamodules import IID, ImageFolder
from pfl_lightning.datamodules.datasets import images


def write_image(path, value, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value // 2, 255 - value)).save(path)


def write_folder(root, splits=("train", "test"), classes=("cat", "ant"), each=5, ending="png"):
    """Pictures whose red value counts the files in the data set's own order within their split."""
    for split in splits:
        for label, name in enumerate(sorted(classes)):
            for number in range(each):
                write_image(root / split / name / f"{number:02d}.{ending}", 10 * (label * each + number))


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "pictures")
    return tmp_path / "pictures"


@pytest.fixture
def decoded(monkeypatch):
    """The files decoded so far."""
    paths = []
    original = images.decode_image

    def record(path, *options):
        paths.append(path)
        return original(path, *options)

    monkeypatch.setattr(images, "decode_image", record)
    return paths


def make(folder, tmp_path, **options):
    return ImageFolder(IID(2), 4, root=str(folder), cache_dir=str(tmp_path / "cache"), **options)


def test_classes_and_files_come_in_sorted_order(folder, tmp_path):
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    (folder / "train" / "cat" / ".hidden.png").write_text("no image")
    samples = make(folder, tmp_path).load()
    assert samples.class_names == ("ant", "cat")
    assert samples.train_inputs.shape == (10, 3, 4, 6)
    assert samples.train_inputs.dtype == torch.uint8
    assert samples.train_inputs[:, 0, 0, 0].tolist() == [10 * i for i in range(10)]
    assert samples.train_inputs[3, :, 0, 0].tolist() == [30, 15, 225]
    assert samples.train_targets.tolist() == [0] * 5 + [1] * 5
    assert samples.test_targets.tolist() == [0] * 5 + [1] * 5


def test_a_class_may_lack_test_images(tmp_path, caplog):
    """Numbers are those of the training classes, whether or not the test folder has an empty one."""
    write_folder(tmp_path / "three", splits=("train",), classes=("a", "b", "c"))
    write_folder(tmp_path / "three", splits=("test",), classes=("a", "c"))
    for _ in range(2):
        data = make(tmp_path / "three", tmp_path, validation_share=0.0)
        data.setup()
        assert data.load().test_targets.tolist() == [0] * 5 + [2] * 5
        assert "has no images of b" in caplog.text
        (tmp_path / "three" / "test" / "b").mkdir(exist_ok=True)


def test_a_flat_folder_is_split(tmp_path):
    write_folder(tmp_path / "flat", splits=(".",), each=8, ending="jpg")
    data = make(tmp_path / "flat", tmp_path, test_share=0.25, validation_share=0.0)
    data.setup()
    trained = [k for client in range(2) for k in data.client_data(client).train.indices.tolist()]
    tested = {k for client in range(2) for k in data.client_data(client).test.indices.tolist()}
    assert len(trained) == 12
    assert not tested & set(trained)
    assert data.load().test_inputs is None


def test_a_validation_folder_is_not_used_and_logged(tmp_path, caplog):
    write_folder(tmp_path / "cinic", splits=("train", "valid", "test"))
    with caplog.at_level(logging.WARNING):
        samples = make(tmp_path / "cinic", tmp_path).load()
    assert len(samples.train_targets) == 10
    assert "valid is not used" in caplog.text


def test_the_second_start_decodes_nothing(folder, tmp_path, decoded):
    first = make(folder, tmp_path).load()
    assert len(decoded) > 0
    decoded.clear()
    second = make(folder, tmp_path).load()
    assert decoded == []
    assert torch.equal(first.train_inputs, second.train_inputs)
    assert torch.equal(first.test_inputs, second.test_inputs)
    make(folder, tmp_path, image_size=3).load()
    assert len(decoded) > 0
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_relative_root_is_the_same_folder(folder, tmp_path, decoded, monkeypatch):
    make(folder, tmp_path).load()
    decoded.clear()
    monkeypatch.chdir(folder)
    for root in (".", "./", folder, f"{folder}/"):
        make(root, tmp_path).load()
    assert decoded == []


def test_a_changed_folder_is_decoded_again(folder, tmp_path, decoded):
    make(folder, tmp_path).load()
    decoded.clear()
    write_image(folder / "train" / "cat" / "99.png", 250)
    with pytest.warns(UserWarning, match="the images have changed"):
        samples = make(folder, tmp_path).load()
    assert samples.train_inputs[10, 0, 0, 0] == 250
    decoded.clear()
    make(folder, tmp_path).load()
    assert decoded == []


DAMAGES = {
    "empty": lambda pixels: b"",
    "cut": lambda pixels: pixels[:-50],
    "no header": lambda pixels: pixels[:100],
    "flipped": lambda pixels: pixels[:1000] + bytes([pixels[1000] ^ 1]) + pixels[1001:],
    "a larger array": lambda pixels: pixels.replace(b"(20,", b"(99999999999,"),
    "another shape": lambda pixels: pixels.replace(b"(20, 3, 4, 6)", b"(20, 3, 6, 4)"),
    "another order": lambda pixels: pixels.replace(b"False", b"True ", 1),
    "foreign": lambda pixels: b"\x89PNG\r\n" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(folder, tmp_path, decoded, damage):
    first = make(folder, tmp_path).load()
    (pixels,) = (tmp_path / "cache").glob("*.npz")
    assert DAMAGES[damage](pixels.read_bytes()) != pixels.read_bytes()
    pixels.write_bytes(DAMAGES[damage](pixels.read_bytes()))
    decoded.clear()
    with pytest.warns(UserWarning, match="is damaged"):
        second = make(folder, tmp_path).load()
    assert len(decoded) > 0
    assert torch.equal(first.train_inputs, second.train_inputs)


def test_a_cache_of_other_rules_is_made_again(folder, tmp_path, decoded, monkeypatch):
    make(folder, tmp_path).load()
    monkeypatch.setattr(images, "DECODER", 2)
    decoded.clear()
    make(folder, tmp_path).load()
    assert len(decoded) > 0


def test_half_files_of_killed_runs_are_removed_after_a_day(folder, tmp_path):
    make(folder, tmp_path).load()
    (pixels,) = (tmp_path / "cache").glob("*.npz")
    old, fresh, other = (
        pixels.parent / name for name in (f".{pixels.name}.11-1.tmp", f".{pixels.name}.12-1.tmp", ".x.13-1.tmp")
    )
    for path in (old, fresh, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (0, 0))
    pixels.unlink()
    make(folder, tmp_path).load()
    assert [path.exists() for path in (old, fresh, other)] == [False, True, True]


def test_a_full_disk_leaves_no_half_cache(folder, tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match=r"cannot store the decoded images in .*No space left"):
        make(folder, tmp_path).load()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_broken_link_is_named(folder, tmp_path):
    (folder / "train" / "cat" / "0.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(FileNotFoundError, match=r"cat.0\.png"):
        make(folder, tmp_path).load()


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot store the decoded images"):
        assert len(make(folder, tmp_path).load().train_targets) == 10


def test_the_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PFL_LIGHTNING_CACHE", str(tmp_path / "own"))
    assert images.default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PFL_LIGHTNING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert images.default_cache_dir() == tmp_path / "pfl_lightning"


def test_mixed_sizes_need_an_image_size(folder, tmp_path):
    write_image(folder / "train" / "cat" / "big.png", 77, (9, 9))
    with pytest.raises(ValueError, match=r"00\.png is 6 x 4, .*big\.png is 9 x 9"):
        make(folder, tmp_path).load()
    assert make(folder, tmp_path, image_size=5).load().train_inputs.shape == (11, 3, 5, 5)


def test_gray_and_transparent_images_become_colors(tmp_path):
    for name, mode in (("a", "L"), ("b", "RGBA"), ("c", "P")):
        (tmp_path / "modes" / name).mkdir(parents=True)
        for number in range(4):
            Image.new(mode, (3, 3), 9 if mode != "RGBA" else (9, 9, 9, 255)).save(
                tmp_path / f"modes/{name}/{number}.png"
            )
    pixels = make(tmp_path / "modes", tmp_path).load().train_inputs
    assert pixels.shape == (12, 3, 3, 3)
    assert (pixels[:8] == 9).all()


def test_what_is_wrong_with_a_folder_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no image folder at .*expected <root>/train/<class>/<image>"):
        make(tmp_path / "nowhere", tmp_path).load()
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match="no class folders in"):
        make(tmp_path / "bare", tmp_path).load()
    (tmp_path / "half" / "test" / "a").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="a folder 'test' but no folder 'train'"):
        make(tmp_path / "half", tmp_path).load()
    write_image(folder / "test" / "dog" / "0.png", 0)
    with pytest.raises(ValueError, match=r"differ in classes: \['dog'\] only in .*test; remove .*test/dog, or"):
        make(folder, tmp_path).load()
    (folder / "train" / "dog").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no images in the class folder .*dog"):
        make(folder, tmp_path).load()
    (folder / "train" / "dog" / "broken.jpg").write_bytes(b"\xff\xd8 not a picture")
    with pytest.raises(ValueError, match=r"cannot read the image .*broken\.jpg"):
        make(folder, tmp_path).load()
    with pytest.raises(ValueError, match="image_size must be at least 1"):
        make(folder, tmp_path, image_size=0)


def test_folders_below_a_class_are_told(folder, tmp_path):
    (folder / "train" / "cat" / "more").mkdir()
    write_image(folder / "train" / "cat" / "more" / "0.png", 0)
    with pytest.warns(UserWarning, match=r"class folder .*cat has subfolders, which are not read: more\. Move"):
        assert len(make(folder, tmp_path).load().train_inputs) == 10


def test_a_truncated_picture_is_named(folder, tmp_path):
    path = folder / "train" / "ant" / "cut.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (4, 6, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cannot read the image .*cut\.jpg"):
        make(folder, tmp_path).load()
