"""Rotations and permuted labels on top of any rule: who sees what, and that nothing else changes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules import (
    IID,
    ClassesPerClient,
    ConceptShift,
    Digits,
    DirichletOverClients,
    DominantClasses,
    FeatureShift,
    FederatedDataModule,
    FromFile,
    PartitionError,
    Quantity,
    RandomFlip,
    Samples,
)
from pfl_lightning.datamodules.partition.transform import draw_permutations, group_of_clients


class Pictures(FederatedDataModule):
    """Random pictures, with a test set of their own if asked for."""

    def __init__(self, partition, *, shape=(3, 6, 6), published=True, classes=5, **kwargs):
        super().__init__(partition, **kwargs)
        self.shape, self.published, self.classes = shape, published, classes

    def load(self):
        generator = torch.Generator().manual_seed(0)

        def some(size):
            inputs = torch.randint(0, 256, (size, *self.shape), dtype=torch.uint8, generator=generator)
            return inputs, torch.arange(size) % self.classes

        return Samples(*some(200), tuple("abcdefghij"[: self.classes]), *(some(100) if self.published else ()))


def ready(rule, **options):
    data = Pictures(rule, **options)
    data.setup()
    return data


def parts(data, client):
    own = data.client_data(client)
    return own.train, own.validation, own.test


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("base", [IID(8), DirichletOverClients(8, 0.3), Quantity(ClassesPerClient(8, 2), (5, 9))])
def test_every_split_is_rotated_and_nothing_else_changes(base, published):
    plain, shifted = ready(base, published=published), ready(FeatureShift(base), published=published)
    for client in range(8):
        for stored, seen in zip(parts(plain, client), parts(shifted, client), strict=True):
            assert torch.equal(stored.indices, seen.indices)
            assert torch.equal(stored.targets, seen.targets)
            assert torch.equal(torch.rot90(stored.raw_inputs, client // 2, (2, 3)), seen.raw_inputs)
            if len(seen):
                inputs, targets = seen.loader(7).tensors()
                assert torch.equal(inputs, torch.rot90(stored.loader(7).tensors()[0], client // 2, (2, 3)))
                assert torch.equal(targets, stored.targets)
    assert shifted.transform == plain.transform
    assert shifted.client_groups == ["", "", "90°", "90°", "180°", "180°", "270°", "270°"]
    assert plain.client_groups is None
    assert np.array_equal(plain.class_counts(), shifted.class_counts())


def test_augmented_batches_are_turned_before_they_are_augmented():
    data = ready(FeatureShift(IID(2), [0, 90]), augment=[RandomFlip(1.0)], normalize=False)
    part = data.client_data(1).train
    (inputs, _), *_ = part.loader(999, generator=torch.Generator(), augment=True)
    stored = data.load().train_inputs[part.indices].float() / 255
    assert torch.equal(inputs, torch.rot90(stored, 1, (2, 3)).flip(-1))


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("base", [IID(10), DominantClasses(10, 12), Quantity(ClassesPerClient(10, 1), (4, 8))])
def test_every_split_is_relabeled_and_nothing_else_changes(base, published):
    plain, shifted = ready(base, published=published), ready(ConceptShift(base, seed=3), published=published)
    permutations = draw_permutations(3, 5, 5)
    for client in range(10):
        forward = torch.tensor(permutations[client // 2])
        for stored, seen in zip(parts(plain, client), parts(shifted, client), strict=True):
            assert torch.equal(stored.indices, seen.indices)
            assert torch.equal(stored.raw_inputs, seen.raw_inputs)
            assert torch.equal(forward[stored.targets], seen.targets)
            assert torch.equal(forward.argsort()[seen.targets], stored.targets)
            assert torch.equal(seen.class_counts(5)[forward], stored.class_counts(5))
            if len(seen):
                assert torch.equal(seen.loader(7).tensors()[1], seen.targets)
                assert torch.equal(torch.cat([y for _, y in seen.loader(3)]), seen.targets)
        assert shifted.class_counts()[client].tolist() == shifted.client_data(client).train.class_counts(5).tolist()
    assert shifted.client_groups == [*[""] * 2, *[f"labels {k}" for k in (1, 1, 2, 2, 3, 3, 4, 4)]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), number=st.integers(1, 6), num_classes=st.integers(3, 70))
def test_permutations_are_different_bijections_and_the_first_moves_nothing(seed, number, num_classes):
    drawn = draw_permutations(seed, number, num_classes)
    assert drawn[0] == tuple(range(num_classes))
    assert len(set(drawn)) == number
    assert all(sorted(own) == list(range(num_classes)) for own in drawn)
    assert drawn[: number - 1] == (draw_permutations(seed, number - 1, num_classes) if number > 1 else ())


def test_too_few_permutations_are_named():
    assert len(draw_permutations(0, 2, 2)) == 2
    with pytest.raises(PartitionError, match="3 groups need as many permutations, 2 classes have 2: lower groups"):
        ready(ConceptShift(IID(6), 3), classes=2)
    assert ready(ConceptShift(IID(6), permutations=[[0, 1], [1, 0], [0, 1]]), classes=2).num_clients == 6
    with pytest.raises(PartitionError, match=r"permutation of client 0 \(group 0\) has 2 classes, the data have 5"):
        ready(ConceptShift(IID(6), permutations=[[0, 1]]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_clients=st.integers(1, 60), num_groups=st.integers(1, 9))
def test_groups_are_contiguous_blocks_of_equal_size(num_clients, num_groups):
    groups = group_of_clients(num_clients, num_groups, None, "angles")
    assert groups == sorted(groups)
    assert 0 <= groups[0] <= groups[-1] < num_groups
    sizes = np.bincount(groups, minlength=num_groups)
    assert sizes.max() - sizes.min() <= 1


def test_groups_as_listed():
    data = ready(FeatureShift(ConceptShift(IID(4), [1, 0, 1, 0]), [0, -90], groups=[0, 1, 1, 0]))
    assert data.client_groups == ["labels 1", "270°", "270°, labels 1", ""]
    for make in (FeatureShift, ConceptShift):
        with pytest.raises(ValueError, match="for each of 4 clients, got"):
            make(IID(4), groups=[0, 1, 1])
    with pytest.raises(ValueError, match="a number from 0 to 1, as there are 2 angles"):
        FeatureShift(IID(4), [0, 90], groups=[0, 1, 2, 0])
    with pytest.raises(ValueError, match="groups must have a number"):
        ConceptShift(IID(2), [0, -1])
    with pytest.raises(ValueError, match="a permutation for each"):
        ConceptShift(IID(4), 3, [[0, 1]])
    with pytest.raises(ValueError, match="every class from 0 to 1 once"):
        ConceptShift(IID(4), permutations=[[1, 1]])
    for wrong in ({"groups": 0}, {"groups": []}, {"permutations": []}):
        with pytest.raises(ValueError, match="at least one group"):
            ConceptShift(IID(4), **wrong)
    with pytest.raises(ValueError, match="at least one angle"):
        FeatureShift(IID(4), [])


def test_shifts_and_sizes_wrap_each_other_in_any_order():
    base = IID(6, 20)
    orders = [
        FeatureShift(ConceptShift(Quantity(base, (5, 9)))),
        ConceptShift(FeatureShift(Quantity(base, (5, 9)))),
        Quantity(ConceptShift(FeatureShift(base)), (5, 9)),
        FeatureShift(FeatureShift(ConceptShift(Quantity(base, (5, 9)), seed=0), [45])),
    ]
    assert len({ready(rule).fingerprint for rule in orders}) == 1


def test_the_fingerprint_tells_views_apart():
    base = IID(6)
    rules = [
        base,
        FeatureShift(base),
        FeatureShift(base, [0, 90]),
        FeatureShift(base, [90, 0]),
        ConceptShift(base),
        ConceptShift(base, seed=1),
        ConceptShift(FeatureShift(base)),
    ]
    assert len({ready(rule).fingerprint for rule in rules}) == len(rules)
    same = (FeatureShift(base, [360]), ConceptShift(base, 1))
    assert {ready(rule).fingerprint for rule in same} == {ready(base).fingerprint}


@pytest.mark.parametrize("ending", [".npz", ".json"])
@pytest.mark.parametrize("published", [True, False])
def test_a_file_brings_the_views_back(tmp_path, ending, published):
    path = tmp_path / f"partition{ending}"
    for wrap in (FeatureShift, ConceptShift, lambda rule: ConceptShift(FeatureShift(rule, [0, 33.5, 90]), 3)):
        data = ready(wrap(IID(6)), published=published)
        data.save_partition(path)
        again = ready(FromFile(str(path)), published=published)
        assert again.fingerprint == data.fingerprint
        assert again.client_groups == data.client_groups
        for client in range(6):
            for one, two in zip(parts(data, client), parts(again, client), strict=True):
                assert torch.equal(one.raw_inputs, two.raw_inputs)
                assert torch.equal(one.targets, two.targets)
        # The same shift on top sets what the file sets already.
        assert ready(wrap(FromFile(str(path))), published=published).fingerprint == data.fingerprint
    ready(IID(6)).save_partition(tmp_path / "plain.json")
    names = {"train", "validation", "test", "checksum", "num_samples", "labels_checksum"}
    assert set(json.loads((tmp_path / "plain.json").read_text())) == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rotations": [0]}, "'train' has 2 clients, 'rotations or label_maps' has 1"),
        ({"rotations": [0, "a"]}, "is not a partition"),
        ({"rotations": 3}, "is not a partition"),
        ({"label_maps": [[0, 1], [0, 0]]}, "every class from 0 to 1 once"),
        ({"label_maps": [0, 1]}, "is not a partition"),
        ({"label_maps": [[1, 0]], "rotations": [0, 0]}, "'label_maps' has 1 clients"),
    ],
)
def test_bad_views_in_a_file_are_refused(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": [[0], [1]], **content}))
    with pytest.raises(PartitionError, match=message):
        FromFile(str(path))


def test_a_file_of_other_classes_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"train": [[0], [1]], "label_maps": [[0, 1], [1, 0]]}')
    with pytest.raises(PartitionError, match="'label_maps' of client 1 has 2 classes, the data have 5"):
        ready(FromFile(str(tmp_path / "a.json")))


def test_what_cannot_be_turned_is_named():
    with pytest.raises(ValueError, match=r"client 1 sees .* 90 degrees, .*\(C, H, W\).*; the inputs have shape \(4,\)"):
        ready(FeatureShift(IID(4)), shape=(4,))
    with pytest.raises(ValueError, match=r"client 1 sees .* square ones for 90 .* have shape \(1, 3, 6\)"):
        ready(FeatureShift(IID(4)), shape=(1, 3, 6))
    data = ready(FeatureShift(IID(4), [0, 180]), shape=(1, 3, 6))
    assert data.client_data(3).train.raw_inputs.shape[1:] == (1, 3, 6)
    assert ready(FeatureShift(IID(4), [0]), shape=(4,)).num_clients == 4
    with pytest.raises(ValueError, match="finite number of degrees, got nan"):
        FeatureShift(IID(4), [float("nan")])


def test_a_class_that_one_client_alone_sees():
    base = ClassesPerClient(10, 1)
    data = Digits(ConceptShift(base, 2), validation_share=0.2)
    data.setup()
    counts = data.class_counts()
    assert ((counts > 0).sum(axis=1) == 1).all()
    for client in range(10):
        own = data.client_data(client)
        assert {*own.train.targets.tolist(), *own.test.targets.tolist()} == {int(counts[client].argmax())}
