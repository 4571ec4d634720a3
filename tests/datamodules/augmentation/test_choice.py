"""Values of a data module's ``augment``: nothing, the usual, or a list, in Python and in a config file."""

import json

import jsonargparse
import pytest
import torch
import yaml
from torchvision.transforms import v2

from pfl_lightning.datamodules import (
    IID,
    Digits,
    FromDatasets,
    RandomCrop,
    RandomFlip,
    RandomRotation,
    StrongAugmentation,
)


@pytest.mark.parametrize(
    ("augment", "expected"),
    [
        (False, ()),
        (True, (RandomCrop(1),)),
        ([], ()),
        ([RandomRotation(5), RandomFlip(0.1)], (RandomRotation(5), RandomFlip(0.1))),
    ],
)
def test_a_list_is_exactly_that(augment, expected):
    data = Digits(IID(4), augment=augment)
    assert data.augmentations == expected
    assert data.augment is (len(expected) > 0)
    data.setup()
    assert data.transform.augmentations == expected
    assert Digits.augmentations == (RandomCrop(1),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("augment: true", (RandomCrop(1),)),
        ("augment: false", ()),
        ("{}", ()),
        ("augment: []", ()),
        (
            "augment: [{class_path: pfl_lightning.datamodules.RandomFlip}, "
            "{class_path: pfl_lightning.datamodules.RandomRotation, init_args: {degrees: 30}}]",
            (RandomFlip(), RandomRotation(30)),
        ),
        (
            "augment: [{class_path: pfl_lightning.datamodules.StrongAugmentation, init_args: {scale: [0.3, 0.9]}}]",
            (StrongAugmentation(scale=(0.3, 0.9)),),
        ),
    ],
)
def test_config_files_say_the_same(text, expected):
    def make(data: Digits) -> Digits:
        return data

    partition = {"class_path": "pfl_lightning.datamodules.IID", "init_args": {"num_clients": 3}}
    config = {"class_path": "pfl_lightning.datamodules.Digits", "init_args": {"partition": partition}}
    config["init_args"].update(yaml.safe_load(text))
    data = jsonargparse.auto_cli(make, as_positional=False, args=[f"--data={json.dumps(config)}"])
    assert data.augmentations == expected
    assert data.augment is (len(expected) > 0)


def test_strong_augmentation_reaches_the_batches():
    data = Digits(IID(4), augment=[StrongAugmentation()], normalize=False)
    data.setup()
    loader = data.client_data(0).train.loader(20, generator=torch.Generator(), shuffle=True, augment=True, views=2)
    inputs, _ = next(iter(loader))
    assert inputs.shape == (20, 2, 1, 8, 8)
    assert inputs.dtype == torch.float32
    assert 0 <= inputs.min() <= inputs.max() <= 1
    assert 0.1 < inputs.mean() < 0.6
    assert not torch.equal(inputs[:, 0], inputs[:, 1])


def floats(values: torch.Tensor) -> FromDatasets:
    items = torch.utils.data.TensorDataset(values, torch.arange(len(values)) % 2)
    return FromDatasets(IID(2), train=items, augment=[RandomFlip(), StrongAugmentation()])


def test_floats_that_are_not_from_black_to_white_are_refused():
    floats(torch.rand(40, 3, 4, 4)).setup()
    with pytest.raises(ValueError, match="StrongAugmentation needs bytes or floats from 0"):
        floats(torch.randn(40, 3, 4, 4)).setup()


@pytest.mark.parametrize("augment", ["yes", RandomFlip(), [v2.RandomHorizontalFlip()], 1, None])
def test_other_things_are_refused(augment):
    with pytest.raises(TypeError, match="augment must be True, False or a list of Augmentation, got"):
        Digits(IID(4), augment=augment)
