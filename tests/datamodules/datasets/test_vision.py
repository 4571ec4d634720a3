"""Published data sets, read from tiny files in the published formats."""

import pickle
import string

import numpy as np
import pytest
import torch
import torchvision

from pfl_lightning.datamodules import CIFAR10, CIFAR100, EMNIST, IID, Digits, FashionMNIST


def pictures(count, *shape):
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_cifar(root, folder, files, meta_name, meta, label_key):
    (root / folder).mkdir()
    for name, rows in files.items():
        content = {"data": rows, label_key: [i % 10 for i in range(len(rows))]}
        (root / folder / name).write_bytes(pickle.dumps(content))
    (root / folder / meta_name).write_bytes(pickle.dumps(meta))


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.tobytes())


def write_mnist(folder, names, count, labels):
    stacks = {}
    for split, (images, targets) in names.items():
        stacks[split] = pictures(count[split], 28, 28)
        write_idx(folder / images, stacks[split])
        write_idx(folder / targets, np.resize(labels, count[split]).astype(np.uint8))
    return stacks


def test_cifar10(tmp_path, monkeypatch):
    # The tiny files have other checksums than the published ones; everything else is read as it would be.
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    files = {f"data_batch_{i}": pictures(4, 3072) for i in range(1, 6)} | {"test_batch": pictures(10, 3072)}
    names = [f"kind {i}" for i in range(10)]
    write_cifar(tmp_path, "cifar-10-batches-py", files, "batches.meta", {"label_names": names}, "labels")
    samples = CIFAR10(IID(2), root=str(tmp_path)).load()
    assert samples.class_names == tuple(names)
    assert samples.train_inputs.shape == (20, 3, 32, 32)
    assert np.array_equal(samples.train_inputs[:4].numpy(), files["data_batch_1"].reshape(4, 3, 32, 32))
    assert samples.test_targets.tolist() == list(range(10))
    assert samples.train_inputs.is_contiguous()


def test_cifar100(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR100, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    files = {"train": pictures(20, 3072), "test": pictures(10, 3072)}
    meta = {"fine_label_names": [f"kind {i}" for i in range(100)]}
    write_cifar(tmp_path, "cifar-100-python", files, "meta", meta, "fine_labels")
    samples = CIFAR100(IID(2), root=str(tmp_path)).load()
    assert len(samples.class_names) == 100
    assert np.array_equal(samples.test_inputs.numpy(), files["test"].reshape(10, 3, 32, 32))


def test_fashion_mnist(tmp_path):
    names = {
        "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    }
    stacks = write_mnist(tmp_path / "FashionMNIST" / "raw", names, {"train": 20, "test": 10}, np.arange(10))
    data = FashionMNIST(IID(2), root=str(tmp_path))
    data.setup()
    assert data.input_shape == (1, 28, 28)
    assert data.class_names[0] == "T-shirt/top"
    samples = data.load()
    assert np.array_equal(samples.train_inputs[:, 0].numpy(), stacks["train"])
    assert samples.test_targets.tolist() == list(range(10))


@pytest.mark.parametrize(("split", "labels", "classes"), [("letters", range(1, 27), 26), ("byclass", range(62), 62)])
def test_emnist(tmp_path, split, labels, classes):
    names = {
        part: (f"emnist-{split}-{part}-images-idx3-ubyte", f"emnist-{split}-{part}-labels-idx1-ubyte")
        for part in ("train", "test")
    }
    count = {"train": 2 * classes, "test": classes}
    stacks = write_mnist(tmp_path / "EMNIST" / "raw", names, count, np.array(labels))
    samples = EMNIST(IID(2), root=str(tmp_path), split=split).load()
    assert samples.train_targets.tolist() == 2 * list(range(classes))
    assert len(samples.class_names) == classes
    assert samples.class_names[-26:] == tuple(string.ascii_lowercase)
    assert np.array_equal(samples.train_inputs[:, 0].numpy(), stacks["train"].transpose(0, 2, 1))  # upright


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100, FashionMNIST, EMNIST])
def test_missing_data_say_how_to_get_them(tmp_path, kind):
    with pytest.raises(FileNotFoundError) as caught:
        kind(IID(2), root=str(tmp_path)).setup()
    message = str(caught.value)
    assert f"no {kind.__name__} under" in message
    assert f"from torchvision.datasets import {kind.__name__}" in message
    assert "download=True" in message
    assert not any(tmp_path.iterdir())


FILES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
ALTERATIONS = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-5],
    "no header": lambda content: content[:3],
    "foreign": lambda content: b"\x89PNG" + content,
    "of another kind": lambda content: bytes([0, 0, 13]) + content[3:],
    "more than there is": lambda content: content[:4] + b"\x7f" + content[5:],
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
@pytest.mark.parametrize("file", FILES)
def test_damaged_files_are_named(tmp_path, file, alter):
    folder = tmp_path / "FashionMNIST" / "raw"
    write_mnist(folder, {"train": FILES[:2], "test": FILES[2:]}, {"train": 20, "test": 10}, np.arange(10))
    (folder / file).write_bytes(alter((folder / file).read_bytes()))
    with pytest.raises(ValueError, match=r"damaged FashionMNIST under .*Download it once with.*remove a damaged copy"):
        FashionMNIST(IID(2), root=str(tmp_path)).load()


def test_labels_that_are_no_classes_are_named(tmp_path):
    folder = tmp_path / "FashionMNIST" / "raw"
    write_mnist(folder, {"train": FILES[:2], "test": FILES[2:]}, {"train": 20, "test": 10}, np.arange(11))
    with pytest.raises(ValueError, match=r"damaged FashionMNIST under .*from 0 to 9, got 0 to 10"):
        FashionMNIST(IID(2), root=str(tmp_path)).load()


def test_emnist_has_two_splits(tmp_path):
    with pytest.raises(ValueError, match=r"one of \('letters', 'byclass'\), got 'mnist'"):
        EMNIST(IID(2), root=str(tmp_path), split="mnist")


def test_digits():
    samples = Digits(IID(2)).load()
    assert samples.train_inputs.shape == (1797, 1, 8, 8)
    assert samples.train_inputs.dtype == torch.uint8
    assert samples.train_inputs.max() == 255
    assert samples.test_inputs is None
    assert samples.class_names == tuple("0123456789")
