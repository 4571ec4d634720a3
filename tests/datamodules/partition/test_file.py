"""Partitions in files: what is written is read back, and bad files are refused with the place of the mistake."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules import (
    IID,
    FederatedDataModule,
    FromFile,
    PartitionError,
    Quantity,
    Samples,
    save_partition,
)


@pytest.mark.parametrize("ending", [".npz", ".json"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_what_is_saved_is_read_back(tmp_path_factory, ending, sizes, seed):
    path = tmp_path_factory.mktemp("partition") / "deeper" / f"parts{ending}"
    order = np.random.default_rng(seed).permutation(60)
    train = np.split(order, np.cumsum(sizes))[: len(sizes)]
    test = [part[: len(part) // 2] for part in train]
    save_partition(path, train, test)
    rule = FromFile(str(path))
    assert rule.num_clients == len(sizes)
    assert all(np.array_equal(*pair) for pair in zip(rule.partition(np.zeros(60, int)), train, strict=True))
    read = rule.partition_test(np.zeros(60, int), [np.zeros(1, int)] * len(sizes))
    assert all(np.array_equal(*pair) for pair in zip(read, test, strict=True))
    assert rule.fixed_validation() is None


class Rows(FederatedDataModule):
    """Rows in the order of the classes, or of two domains."""

    def __init__(self, partition, labels, **options):
        super().__init__(partition, 5, **options)
        self.labels = torch.tensor(labels)

    def load(self):
        return Samples(torch.arange(len(self.labels))[:, None], self.labels, tuple("abcdef"))


@pytest.mark.parametrize("ending", [".npz", ".json"])
def test_a_file_is_refused_for_samples_in_another_order(tmp_path, ending):
    path, labels = tmp_path / f"partition{ending}", [0, 1, 2, 3, 4, 5] * 20 + [0, 1] * 20
    data = Rows(IID(3), labels, public=30, seed=0)
    data.setup()
    data.save_partition(path)
    again = Rows(FromFile(path), labels, public=30, seed=0)
    again.setup()
    assert again.fingerprint == data.fingerprint
    for other in (Rows(FromFile(path), labels, public=30, seed=1), Rows(FromFile(path), labels[::-1], public=30)):
        with pytest.raises(PartitionError, match="divides 130 samples whose classes are in another order"):
            other.setup()
    without = Rows(FromFile(path), [0] * 160, public=30)  # nothing tells their order
    without.setup()


def test_lists_that_are_no_indices_are_not_saved(tmp_path):
    for train, message in (([[1.5, 2]], "whole numbers"), ([[True, False]], "whole numbers"), ([], "no index list")):
        with pytest.raises(ValueError, match=message):
            save_partition(tmp_path / "partition.npz", train)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "partition.json"
    path.write_text('{"train": [[0], [1]]}', encoding="utf-8-sig")
    assert [part.tolist() for part in FromFile(path).partition(np.zeros(2, dtype=int))] == [[0], [1]]


def test_arrays_of_shape_clients_by_samples(tmp_path):
    np.savez(tmp_path / "a.npz", train=np.arange(12).reshape(3, 4), test=np.arange(6).reshape(3, 2))
    rule = FromFile(str(tmp_path / "a.npz"))
    assert rule.num_clients == 3
    assert [part.tolist() for part in rule.partition(np.zeros(12, int))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert rule.partition_test(np.zeros(6, int), [])[2].tolist() == [4, 5]
    assert Quantity(rule, (2,)).fixed_test
    assert [len(part) for part in Quantity(rule, (2,)).partition(np.zeros(12, int))] == [2, 2, 2]


def test_without_test_lists_test_splits_are_drawn(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"train": [[0, 1], [2]]}))
    rule = FromFile(str(tmp_path / "a.json"))
    assert not rule.fixed_test
    tests = rule.partition_test(np.array([0, 1, 1]), [np.array([1, 1]), np.array([0])])
    assert [part.tolist() for part in tests] == [[1, 2], [0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"test": [[1]]}, r"expected index lists named 'train', found \['test'\]"),
        ({"train": [[0], [1]], "test": [[0]]}, "'train' has 2 clients, 'test' has 1"),
        ({"train": [[0, 1], [2, 2]]}, "the indices 'train' of client 1 must be unique numbers of samples"),
        ({"train": [[0], [-4]]}, "client 1 must be unique numbers of samples"),
        ({"train": [[0], []]}, "'train' of client 1 must be unique numbers of samples, and at least one"),
        ({"train": [[0.5]]}, "whole numbers"),
        ({"train": [["a"]]}, "whole numbers"),
        ({"train": 3}, "not a partition"),
        ({"train": [[0]], "tests": [[1]]}, "unknown 'tests', known are train, validation, test"),
        ([[1]], "not a partition|expected index lists"),
    ],
)
def test_bad_content_is_refused(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match=message):
        FromFile(str(path))


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no partition file at"):
        FromFile(str(tmp_path / "missing.npz"))
    for name in ("a.npz", "a.json", "a.txt"):
        (tmp_path / name).write_text("nonsense")
        with pytest.raises(PartitionError, match=r"a partition|ends in"):
            FromFile(str(tmp_path / name))
    np.savez(tmp_path / "flat.npz", train=np.arange(4))
    with pytest.raises(PartitionError, match="shape"):
        FromFile(str(tmp_path / "flat.npz"))
    np.savez(tmp_path / "objects.npz", train=np.array([[1], [2, 3]], dtype=object))
    with pytest.raises(PartitionError, match="not a partition"):
        FromFile(str(tmp_path / "objects.npz"))
    with pytest.raises(ValueError, match=r"saved as \.npz or \.json"):
        save_partition(tmp_path / "a.csv", [np.arange(3)])


def test_indices_out_of_range_and_shared_samples(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": [[0, 1], [1, 9]], "test": [[0], [7]]}))
    rule = FromFile(str(path))
    with pytest.raises(PartitionError, match="'train' of client 1 has index 9, and there are 9 samples"):
        rule.partition(np.zeros(9, int))
    with pytest.raises(PartitionError, match="'test' of client 1 has index 7, and there are 5"):
        rule.partition_test(np.zeros(5, int), [])
    with pytest.warns(UserWarning, match="1 training indices belong to more than one client"):
        rule.partition(np.zeros(10, int))
