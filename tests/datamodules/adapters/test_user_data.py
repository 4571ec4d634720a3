"""User-defined data: pairs of Datasets and LightningDataModules."""

import math

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from pfl_lightning.datamodules import IID, FromDatasets, FromLightning, FromLoaders, Samples


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


def tensors(count, start=0.0):
    return TensorDataset(torch.arange(start, start + count)[:, None].repeat(1, 2), torch.arange(count) % 3)


def load(train, test=None, **options):
    return FromDatasets(IID(2), train=train, test=test, **options).load()


def test_tensors_are_read_in_order():
    samples = load(tensors(12), tensors(6, 100.0))
    assert torch.equal(samples.train_inputs, tensors(12).tensors[0])
    assert samples.train_targets.tolist() == [0, 1, 2] * 4
    assert samples.test_inputs[0].tolist() == [100.0, 100.0]
    assert samples.class_names == ("0", "1", "2")
    assert load(tensors(12), class_names=["a", "b", "c"]).class_names == ("a", "b", "c")


def test_pictures_and_arrays_keep_their_bytes():
    color = Image.new("RGB", (4, 3), (1, 2, 3))
    samples = load(Items(*[(color, 0)] * 3, (color, np.int64(1))))
    assert samples.train_inputs.shape == (4, 3, 3, 4)
    assert samples.train_inputs.dtype == torch.uint8
    assert samples.train_inputs[0, :, 0, 0].tolist() == [1, 2, 3]
    gray = load(Items((Image.new("L", (4, 3), 7), torch.tensor(1)), (Image.new("L", (4, 3), 8), torch.tensor([0]))))
    assert gray.train_inputs.shape == (2, 1, 3, 4)
    arrays = load(Items((np.zeros((2, 5)), 0), (np.ones((2, 5)), 1)))
    assert arrays.train_inputs.dtype == torch.float32


def test_the_whole_module_works_without_a_test_set():
    data = FromDatasets(IID(3), 4, train=tensors(60))
    data.setup()
    assert (
        sum(len(part) for k in range(3) for part in (data.client_data(k).train, data.client_data(k).validation)) == 45
    )
    assert all(len(data.client_data(k).test) > 0 for k in range(3))


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Items(), ValueError, "the training set is empty"),
        (Items((torch.zeros(2), 0), (torch.zeros(3), 0)), ValueError, r"item 1 .*shape \(3,\), item 0 .*shape \(2,\)"),
        (Items((torch.zeros(2), 0), (torch.zeros(2).int(), 0)), ValueError, "item 1 .*int32.*item 0.*float32"),
        (Items(torch.zeros(2)), TypeError, r"item 0 of the training set is a Tensor, expected a pair"),
        (Items((torch.zeros(2), 0, 1)), TypeError, "expected a pair"),
        (Items(("text", 0)), TypeError, "the input in item 0 of the training set is a str"),
        (Items((torch.zeros(2), 0.5)), TypeError, "the class in item 0 of the training set is 0.5"),
        (
            Items((torch.zeros(2), torch.tensor(math.nan))),
            TypeError,
            "the class in item 0 of the training set is tensor",
        ),
        (Items((torch.zeros(2), torch.zeros(3))), TypeError, "the class in item 0"),
        (Items((torch.zeros(2), -1)), ValueError, "training targets must be from 0 to"),
    ],
)
def test_items_that_do_not_fit_are_named(dataset, error, message):
    with pytest.raises(error, match=message):
        load(dataset)


def test_streams_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(TypeError, match="Stream, which cannot be indexed"):
        load(Stream())


def test_random_transforms_are_reported_as_frozen():
    class Noisy(Items):
        def __getitem__(self, place):
            return torch.rand(3), 0

    with pytest.warns(UserWarning, match="a random transform in it is frozen"):
        load(Noisy(*range(9)))


def test_equal_items_with_nan_are_not_random(recwarn):
    broken = [torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([torch.inf, torch.nan, -torch.inf])]
    load(Items(*[(value, 0) for value in broken]))
    assert not [warning for warning in recwarn if "frozen" in str(warning.message)]

    class Noisy(Items):
        def __getitem__(self, place):
            return torch.cat([torch.tensor([torch.nan]), torch.rand(2)]), 0

    with pytest.warns(UserWarning, match="a random transform in it is frozen"):
        load(Noisy(*range(9)))

    class Wandering(Items):
        def __getitem__(self, place):
            value = torch.zeros(3)
            value[torch.randperm(3)[0]] = torch.nan
            return value, 0

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="a random transform in it is frozen"):
        load(Wandering(*range(9)))


def test_inputs_that_are_not_finite_are_reported_once_and_kept(recwarn):
    train = tensors(12)
    train.tensors[0][5, 1], train.tensors[0][7, 0] = torch.nan, torch.inf
    options = {"validation_share": 0.0, "class_names": "abc"}
    data = FromDatasets(IID(2), train=train, test=tensors(6, 100.0), **options)
    data.setup()
    (warning,) = [str(warning.message) for warning in recwarn]
    assert "values that are not finite (2 of 12 items, the first of this client: item" in warning
    assert torch.equal(load(train).train_inputs.isfinite(), train.tensors[0].isfinite())
    huge = Items(*((np.array([1e300, 0.0]), place % 3) for place in range(6)))  # too large for single precision
    with pytest.warns(UserWarning, match="test items of client 0 and 1 more have .*6 of 6"):
        FromDatasets(IID(2), train=tensors(12), test=huge, **options).setup()


def test_a_test_set_that_numbers_its_classes_otherwise_is_refused():
    train, test = tensors(12), tensors(6, 100.0)
    train.classes, test.classes = ["ant", "bee", "cat"], ["ant", "cat"]
    with pytest.raises(ValueError, match="class 1 is 'bee' in the training set and 'cat' in the test set"):
        load(train, test)
    test.classes = ["ant", "bee", "cat"]
    assert load(train, test).class_names == ("ant", "bee", "cat")


def test_rows_of_several_lengths_are_told_to_be_padded():
    rows = [torch.arange(length) for length in (3, 5, 2)]
    with pytest.raises(ValueError, match="pad rows to one length"):
        load(Items(*((row, place % 2) for place, row in enumerate(rows))))
    padded = [torch.nn.functional.pad(row, (0, 5 - len(row))) for row in rows]
    assert load(Items(*((row, place % 2) for place, row in enumerate(padded)))).train_inputs.shape == (3, 5)


class Own(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        return DataLoader(tensors(12), batch_size=5, shuffle=True)


class OwnWithValidation(Own):
    def val_dataloader(self):
        return [DataLoader(tensors(6, 100.0))]


class OwnWithTest(OwnWithValidation):
    def test_dataloader(self):
        return DataLoader(tensors(3, 200.0))


@pytest.mark.parametrize(
    ("kind", "first", "calls"),
    [
        (Own, None, ["prepare", "fit"]),
        (OwnWithValidation, 100.0, ["prepare", "fit"]),
        (OwnWithTest, 200.0, ["prepare", "fit", "test"]),
    ],
)
def test_a_user_defined_module(kind, first, calls):
    own = kind()
    samples = FromLightning(IID(2), datamodule=own).load()
    assert own.calls == calls
    assert samples.train_inputs[:, 0].tolist() == list(range(12))
    assert (samples.test_inputs[0, 0].item() if first else samples.test_inputs) == first


class Others(SubsetRandomSampler):
    """A class of the user's."""


def sampled(kind, places):
    if kind is BatchSampler:
        return DataLoader(tensors(12), batch_sampler=BatchSampler(SubsetRandomSampler(places), 4, False))
    return DataLoader(tensors(12), 4, sampler=kind(places))


@pytest.mark.parametrize("kind", [SubsetRandomSampler, Others, BatchSampler, list, torch.as_tensor])
def test_loaders_of_parts_of_one_data_set(kind):
    class Parts(Own):
        def train_dataloader(self):
            return sampled(kind, range(8))

        def val_dataloader(self):
            return sampled(kind, torch.arange(8, 12))

    samples = FromLightning(IID(2), datamodule=Parts()).load()
    assert samples.train_inputs[:, 0].tolist() == list(range(8))
    assert samples.test_inputs[:, 0].tolist() == list(range(8, 12))
    data = FromLoaders(IID(2), datamodule=Parts())
    data.setup()
    own = [data.client_data(client) for client in range(2)]
    assert sum(len(one.train) for one in own) == 8
    trained = [int(row) for one in own for inputs, _ in one.train.loader(4) for row in inputs[:, 0]]
    assert sorted(trained) == list(range(8))
    judged = [int(row) for one in own for inputs, _ in one.validation.loader(4) for row in inputs[:, 0]]
    assert judged
    assert set(judged) <= set(range(8, 12))


def test_several_loaders_are_refused():
    class Two(Own):
        def train_dataloader(self):
            return {"a": DataLoader(tensors(3)), "b": DataLoader(tensors(3))}

    with pytest.raises(TypeError, match="train_dataloader gives a dict, expected a single DataLoader"):
        FromLightning(IID(2), datamodule=Two()).load()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 2), torch.zeros(2).long(), ("a",)), "one class for each sample"),
        ((torch.zeros(3, 2), torch.zeros(3), ("a",)), "must be int64"),
        ((torch.zeros(1, 2), torch.ones(1).long(), ("a",)), "from 0 to 0, got 1 to 1"),
        ((torch.zeros(1, 2), torch.zeros(1).long(), ("a",), torch.zeros(1, 2)), "given together"),
        ((torch.zeros(1, 2), torch.zeros(1).long(), ("a",), torch.zeros(1, 3), torch.zeros(1).long()), "same"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Samples(*arguments)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(3), r"must be int64, .* got torch\.float32 .*; regression, .* needs your own LightningModule"),
        (
            torch.zeros(3, 2).long(),
            r"one class for each sample, got torch\.int64 of shape \(3, 2\) for 3 inputs; regression, or several",
        ),
    ],
    ids=["numbers", "several labels"],
)
def test_samples_that_are_not_of_one_class_each_name_the_way(targets, message):
    with pytest.raises(ValueError, match=message):
        Samples(torch.zeros(3, 2), targets, ("a",))


def test_arrays_in_the_place_of_tensors():
    with pytest.raises(ValueError, match=r"training targets must be a tensor, got a ndarray: pass torch\.as_tensor"):
        Samples(torch.zeros(3, 2), np.zeros(3, dtype=np.int64), ("a",))
    with pytest.raises(ValueError, match=r"training inputs must be a tensor, got a ndarray"):
        Samples(np.zeros((3, 2)), torch.zeros(3).long(), ("a",))
