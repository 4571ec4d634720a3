"""Unlabeled samples: their assignment, the clients' views of them, and partition files with them."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.utils.data import TensorDataset

from pfl_lightning.datamodules import (
    IID,
    ConceptShift,
    FeatureShift,
    FederatedDataModule,
    FromDatasets,
    FromFile,
    PartitionError,
    Samples,
    partition_table,
)
from pfl_lightning.datamodules.clients.division import assign_unlabeled


class Pictures(FederatedDataModule):
    """Random pictures, some without labels."""

    def __init__(self, partition, *args, further=37, **options):
        super().__init__(partition, *args, **options)
        self.further = further

    def load(self):
        generator = torch.Generator().manual_seed(0)

        def some(size):
            return torch.randint(0, 256, (size, 1, 4, 4), dtype=torch.uint8, generator=generator)

        inputs = some(120), torch.arange(120) % 3
        further = some(self.further) if self.further else None
        return Samples(*inputs, tuple("abc"), some(60), torch.arange(60) % 3, unlabeled_inputs=further)


def ready(rule=None, *args, **options):
    data = Pictures(rule or IID(5), *args, **options)
    data.setup()
    return data


def indices(data, client):
    return data.client_data(client).unlabeled.indices.tolist()


@given(
    clients=st.integers(1, 40), samples=st.integers(0, 300), aside=st.sets(st.integers(0, 39)), seed=st.integers(0, 3)
)
def test_the_assignment(clients, samples, aside, seed):
    novel = sorted({client for client in aside if client < clients})[: clients - 1]
    shares = assign_unlabeled(IID(clients), samples, novel, seed)
    training = [share for client, share in enumerate(shares) if client not in novel]
    assert sorted(np.concatenate(shares).tolist()) == list(range(samples))
    sizes = [len(share) for share in training]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(shares[client]) == 0 for client in novel)
    again = assign_unlabeled(IID(clients, seed=9), samples, novel, seed)  # the rule and its seed have no part in it
    assert all(np.array_equal(one, other) for one, other in zip(shares, again, strict=True))


def test_another_seed_assigns_otherwise():
    assert indices(ready(seed=0), 0) != indices(ready(seed=1), 0)


def test_a_client_sees_its_own():
    data, samples = ready(novel_clients=2), Pictures(IID(5)).load()
    for client in range(5):
        own = data.client_data(client)
        assert torch.equal(own.unlabeled.raw_inputs, samples.unlabeled_inputs[own.unlabeled.indices])
        assert own.unlabeled.targets.tolist() == [-1] * len(own.unlabeled)
        assert own.unlabeled.class_counts(3).tolist() == [0, 0, 0]
        assert (len(own.unlabeled) == 0) == (client in data.novel)
        assert data.unlabeled_sizes[client] == len(own.unlabeled)


def test_both_as_one_split():
    data = ready(augment=False)
    own = data.client_data(1)
    part = own.train_and_unlabeled
    assert len(part) == len(own.train) + len(own.unlabeled)
    assert torch.equal(part.class_counts(3), own.train.class_counts(3))
    inputs, targets = part.loader(8).tensors()
    separate = [p.loader(8).tensors() for p in (own.train, own.unlabeled)]
    assert torch.equal(inputs, torch.cat([x for x, _ in separate]))
    assert torch.equal(targets, torch.cat([y for _, y in separate]))
    pieces = [piece.loader(8).tensors() for piece in part.split(5)]
    assert max(len(x) for x, _ in pieces) == 5
    assert torch.equal(torch.cat([x for x, _ in pieces]), inputs)
    assert torch.equal(torch.cat([y for _, y in pieces]), targets)
    shuffled = part.loader(8, shuffle=True, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(3))
    for batch, rows in zip(shuffled, order.split(8), strict=True):
        assert torch.equal(batch[0], inputs[rows])
        assert torch.equal(batch[1], targets[rows])


def test_augmented_pairs_of_views_have_both():
    own = ready(augment=True).client_data(1)
    loader = own.train_and_unlabeled.loader(
        8, shuffle=True, augment=True, views=2, generator=torch.Generator().manual_seed(0)
    )
    batches = list(loader)
    assert sum(len(x) for x, _ in batches) == len(own.train) + len(own.unlabeled)
    assert all(x.shape[1:] == (2, 1, 4, 4) for x, _ in batches)
    assert sum(int((y == -1).sum()) for _, y in batches) == len(own.unlabeled)


def test_without_any_the_split_is_the_training_split():
    own = ready(further=0).client_data(1)
    assert own.train_and_unlabeled is own.train
    assert len(own.unlabeled) == 0
    assert own.unlabeled.raw_inputs.shape == (0, 1, 4, 4)
    assert ready(further=0).unlabeled_sizes is None


def test_they_are_seen_through_the_clients_view():
    turned, renamed, plain = ready(FeatureShift(IID(5))), ready(ConceptShift(IID(5))), ready()
    views = [getattr(turned.client_data(client).train, "view", None) for client in range(5)]
    angles = [0 if view is None else view.rotation for view in views]
    assert len(set(angles)) > 1
    for client, angle in enumerate(angles):
        images = plain.client_data(client).unlabeled.raw_inputs
        expected = torch.rot90(images, int(angle) // 90, (2, 3))
        assert torch.equal(turned.client_data(client).unlabeled.raw_inputs, expected)
        own = renamed.client_data(client)
        assert set(own.unlabeled.targets.tolist()) == {-1}
        assert own.train_and_unlabeled.class_counts(3).tolist() == own.train.class_counts(3).tolist()


def test_the_fingerprint_covers_the_assignment():
    def of(**options):
        return ready(validation_share=0.0, **options).fingerprint

    assert of(seed=0) == of(seed=0)
    assert of(seed=0) != of(seed=1)  # the rule's own seed decides all the rest
    assert of(seed=0, further=0) == of(seed=1, further=0)
    assert of(seed=0) != of(seed=0, further=36)


@pytest.mark.parametrize("ending", [".npz", ".json"])
@pytest.mark.parametrize(
    "wrap", [lambda rule: rule, lambda rule: FeatureShift(rule, groups=[0] * 5)], ids=["", "wrapped"]
)
def test_a_file_gives_the_same_again(tmp_path, ending, wrap):
    data = ready(novel_clients=2, seed=3)
    path = tmp_path / f"partition{ending}"
    data.save_partition(path)
    again = ready(wrap(FromFile(str(path))), novel_clients=2, seed=3)
    assert [indices(again, client) for client in range(5)] == [indices(data, client) for client in range(5)]
    assert again.fingerprint == data.fingerprint
    other = ready(FromFile(str(path)), novel_clients=2, seed=1)  # names other clients
    assert other.novel != data.novel
    assert all(indices(other, client) == [] for client in other.novel)
    without = ready(FromFile(str(path)), further=0)
    assert without.unlabeled_sizes is None


def test_a_file_of_labeled_samples_alone(tmp_path):
    path = tmp_path / "partition.json"
    ready(further=0).save_partition(path)
    assert "unlabeled" not in path.read_text()
    data = ready(FromFile(str(path)))
    assert [indices(data, client) for client in range(5)] == [indices(ready(), client) for client in range(5)]


def test_a_file_for_more_samples(tmp_path):
    path = tmp_path / "partition.npz"
    ready().save_partition(path)
    with pytest.raises(PartitionError, match=r"'unlabeled' of client \d has index 36, and there are 36 samp"):
        ready(FromFile(str(path)), further=36)


def test_drop_last_counts_what_trains():
    """Clients of 18 labeled samples; 7 or 8 without labels for each of the five, or 12 or 13 for three."""
    ready(IID(5, samples_per_client=20), 25, drop_last=True)
    with pytest.raises(PartitionError, match=r"client \d no batch .* it has 25 training samples, batch_size is 26"):
        ready(IID(5, samples_per_client=20), 26, drop_last=True)
    ready(IID(5, samples_per_client=20), 30, drop_last=True, novel_clients=2)
    with pytest.raises(PartitionError, match=r"it has 18 training samples, batch_size is 25"):
        ready(IID(5, samples_per_client=20), 25, drop_last=True, further=0)


def test_the_table_shows_them():
    data = ready(IID(5, samples_per_client=20), novel_clients=2)
    console = Console(width=150, file=io.StringIO())
    sizes = data.unlabeled_sizes
    console.print(partition_table(data.class_counts(), data.class_names, unlabeled=sizes))
    text = console.file.getvalue()
    assert "training samples, 37 unlabeled" in " ".join(text.split())
    lines = [line.split() for line in text[text.index("client ") :].splitlines()]
    header, *rows = [words for words in lines if words and words[0].isalnum()]
    assert header[:3] == ["client", "samples", "unlabeled"]
    assert [int(row[2]) for row in rows] == sizes.tolist()


def further(*items):
    return FromDatasets(IID(2), train=TensorDataset(torch.zeros(12, 2), torch.arange(12) % 3), unlabeled=list(items))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: (x, "name", 3)], ids=["input", "1", "3"])
def test_a_dataset_without_labels(wrap):
    rows = torch.arange(10.0).reshape(5, 2)
    data = further(*(wrap(row) for row in rows))
    data.setup()
    assert torch.equal(data._loaded.samples.unlabeled_inputs, rows)
    assert data.unlabeled_sizes.tolist() == [3, 2]
    assert data.__getstate__()["unlabeled"] is None


def test_what_is_no_such_dataset():
    with pytest.raises(TypeError, match="the input in item 1 of the unlabeled set is a str"):
        further(torch.zeros(2), "two").load()
    with pytest.raises(ValueError, match="the unlabeled set is empty"):
        further().load()
    with pytest.raises(
        ValueError, match=r"training inputs are torch.float32 of shape \(2,\), unlabeled inputs torch.fl"
    ):
        further(torch.zeros(3)).load()
    with pytest.raises(ValueError, match=r"unlabeled inputs torch.uint8 of shape \(2,\): both must be the same"):
        further(torch.zeros(2, dtype=torch.uint8)).load()
