"""The division as a whole: what is measured on it, what names it, and that a rule's mistakes are named."""

import time

import numpy as np
import pytest
import torch

from pfl_lightning.datamodules import (
    IID,
    ClassesPerClient,
    Digits,
    DirichletOverClients,
    FederatedDataModule,
    FromFile,
    Partitioner,
    PartitionError,
    Samples,
    save_partition,
)
from pfl_lightning.datamodules.partition.file import read_partition


class Toy(FederatedDataModule):
    """Inputs that say which sample they are."""

    def __init__(self, partition, *, size=120, test_size=90, **kwargs):
        super().__init__(partition, **kwargs)
        self.size, self.test_size = size, test_size

    def load(self):
        def numbered(size):
            return torch.arange(size, dtype=torch.float32)[:, None], torch.arange(size) % 3

        return Samples(*numbered(self.size), tuple("abc"), *(numbered(self.test_size) if self.test_size else ()))


def ready(*args, **kwargs) -> Toy:
    data = Toy(*args, **kwargs)
    data.setup()
    return data


class Pictures(FederatedDataModule):
    """Six gray values, one a sample; a test set of its own if asked for."""

    def __init__(self, partition, published, **kwargs):
        super().__init__(partition, **kwargs)
        self.published = published

    def load(self):
        inputs = torch.tensor([0, 51, 102, 153, 204, 255], dtype=torch.uint8).view(6, 1, 1, 1)
        targets = torch.tensor([0, 1, 0, 1, 0, 1])
        test = (inputs.clone(), targets.clone()) if self.published else (None, None)
        return Samples(inputs, targets, ("a", "b"), *test)


@pytest.mark.parametrize("rule", [IID(4, seed=3), ClassesPerClient(7, 2, 30), DirichletOverClients(5, 0.3)])
@pytest.mark.parametrize("validation_share", [0.0, 0.2])
def test_a_replayed_partition_has_the_same_channel_statistics(tmp_path, rule, validation_share):
    data = Digits(rule, validation_share=validation_share)
    data.setup()
    data.save_partition(tmp_path / "partition.npz")
    again = Digits(FromFile(str(tmp_path / "partition.npz")), seed=9)
    again.setup()
    assert again.transform == data.transform
    clients = [data.client_data(k) for k in range(data.num_clients)]
    held = torch.cat([part.indices for own in clients for part in (own.train, own.validation)]).unique()
    images = data.load().train_inputs[held].double() / 255
    assert data.transform.mean == pytest.approx([float(images.mean())], abs=1e-12)
    assert data.transform.std == pytest.approx([float(images.std(correction=0))], abs=1e-12)
    assert not set(held.tolist()) & {int(index) for own in clients for index in own.test.indices}


def test_channel_statistics_cover_what_clients_hold_or_the_whole_published_training_set(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"train": [[1], [2]], "validation": [[3], []], "test": [[0], [4]]}')
    for published, mean in ((False, 0.4), (True, 0.5)):
        data = Pictures(FromFile(str(path)), published)
        data.setup()
        assert data.transform.mean == pytest.approx((mean,), abs=1e-12)


def test_given_statistics_apply_to_floats_too_and_measured_ones_do_not():
    assert ready(IID(2)).transform.mean is None
    own = ready(IID(2), mean=[4.0], std=[2.0]).client_data(0).train
    assert torch.equal(own.loader(99).tensors()[0], (own.raw_inputs - 4) / 2)


@pytest.mark.parametrize("ending", [".npz", ".json"])
@pytest.mark.parametrize("test_size", [90, 0])
def test_the_fingerprint_names_the_division(tmp_path, ending, test_size):
    with pytest.raises(RuntimeError, match="call setup"):
        _ = Toy(IID(4)).fingerprint
    data = ready(IID(4), test_size=test_size)
    assert len(data.fingerprint) == 16
    assert int(data.fingerprint, 16) >= 0
    assert ready(IID(4), test_size=test_size).fingerprint == data.fingerprint
    data.save_partition(tmp_path / f"partition{ending}")
    replay = FromFile(str(tmp_path / f"partition{ending}"))
    assert ready(replay, test_size=test_size, seed=8).fingerprint == data.fingerprint
    save_partition(tmp_path / "any_size.json", **read_partition(tmp_path / f"partition{ending}").parts)
    any_size = FromFile(str(tmp_path / "any_size.json"))
    assert ready(any_size, test_size=test_size).fingerprint == data.fingerprint
    others = [
        ready(IID(4, seed=1), test_size=test_size),
        ready(IID(5), test_size=test_size),
        ready(IID(4), test_size=test_size, seed=1),
        ready(IID(4), test_size=test_size, validation_share=0.2),
        ready(IID(4), test_size=test_size, test_samples_per_client=5),
        ready(any_size, test_size=test_size, size=123),
        *([ready(replay, test_size=93)] if test_size else []),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_the_fingerprint_keeps_order_and_lengths_apart(tmp_path):
    seen = set()
    for lists in ("[[0, 1], [2]]", "[[1, 0], [2]]", "[[0], [1, 2]]", "[[2], [0, 1]]"):
        path = tmp_path / "a.json"
        path.write_text(f'{{"train": {lists}, "test": [[3], [3]]}}')
        seen.add(ready(FromFile(str(path)), validation_share=0.0).fingerprint)
    assert len(seen) == 4


def test_the_fingerprint_is_the_same_in_every_release(tmp_path):
    # Checkpoints hold it: a change here makes those of earlier releases unreadable.
    path = tmp_path / "a.json"
    path.write_text('{"train": [[5, 3], [8]], "validation": [[1], []], "test": [[2], [7, 0]]}')
    assert ready(FromFile(str(path))).fingerprint == "fa463ee14fef3461"


def test_the_fingerprint_is_cheap_for_many_clients():
    data = ready(IID(10_000), size=60_000, test_size=3000)
    start = time.process_time()
    assert data.fingerprint
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "Own.partition gave a NoneType, expected 2 index lists, one per client"),
        ([[0]], "Own.partition gave 1 index lists, expected 2 index lists, one per client"),
        ([[0], [1], [2]], "Own.partition gave 3 index lists, expected 2 index lists, one per client"),
        ([[0], [1.0]], r"client 1 got no index list: float64 of shape \(1,\) instead of a list of whole numbers"),
        ([[True, False], [1]], r"client 0 got no index list: bool of shape \(2,\)"),
        ([[0], 3], r"client 1 got no index list: int64 of shape \(\)"),
        ([[0], [[1], [2, 3]]], "client 1 got no index list: "),
        ([[0], None], r"client 1 got no index list: object of shape \(\)"),
        ([[0, 120], [1]], "client 0 got index 120, expected whole numbers from 0 to 119"),
        ([[0], [2, -1]], "client 1 got index -1, expected"),
        ([[0], []], r"client\(s\) \[1\] have no training samples"),
    ],
)
def test_the_index_lists_of_a_user_defined_rule_are_checked(parts, message):
    class Own(Partitioner):
        def partition(self, labels):
            return parts

    with pytest.raises(PartitionError, match=message):
        ready(Own(2))


def test_a_user_defined_rule_may_give_any_kind_of_whole_numbers():
    class Own(Partitioner):
        def partition(self, labels):
            return ([3, 4], np.array([5, 6], dtype=np.uint8), torch.tensor([7]))

    data = ready(Own(3), validation_share=0.0)
    assert [data.client_data(client).train.indices.tolist() for client in range(3)] == [[3, 4], [5, 6], [7]]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[4, 3, 4], [5]], "1 too many, first 4"),
        ([[1, 2, 3], [3, 2, 4]], "2 too many, first 2"),
        ([[1, 2], [3]], None),
    ],
)
def test_indices_that_a_rule_lists_twice_are_counted_in_a_warning(recwarn, parts, said):
    class Own(Partitioner):
        def partition(self, labels):
            return parts

    data = ready(Own(2), validation_share=0.0)
    assert [sorted(data.client_data(client).train.indices.tolist()) for client in range(2)] == [*map(sorted, parts)]
    found = [str(one.message) for one in recwarn if "more than once" in str(one.message)]
    assert len(found) == (said is not None)
    assert said is None or (found[0].startswith("Own.partition lists") and said in found[0])


def test_indices_of_a_rule_count_the_samples_it_was_shown():
    class Own(Partitioner):
        def partition(self, labels):
            return [[0], [len(labels)]]

    with pytest.raises(PartitionError, match="client 1 got index 90, expected whole numbers from 0 to 89"):
        ready(Own(2), test_size=0)
