"""Pictures of every kind read from a Dataset, and data sets that have no end."""

import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from pfl_lightning.datamodules import IID, FromDatasets, FromLoaders
from pfl_lightning.datamodules.adapters.labels import classes_of
from pfl_lightning.datamodules.adapters.user_data import read_dataset

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


def palette():
    picture = Image.fromarray(RAMP)
    picture.putpalette(
        np.stack([255 - np.arange(256), np.arange(256), np.full(256, 7)], axis=1).astype(np.uint8).tobytes()
    )
    return picture


PICTURES = {
    "palette": (palette(), np.stack([255 - RAMP, RAMP, np.full_like(RAMP, 7)])),
    "16 bits": (Image.fromarray(RAMP.astype(np.uint16) * 257), RAMP[None]),
    "black and white": (Image.fromarray(RAMP > 99), np.where(RAMP > 99, 255, 0)[None]),
    "gray": (Image.fromarray(RAMP), RAMP[None]),
    "colors": (Image.fromarray(np.stack([RAMP] * 3, axis=2)), np.stack([RAMP] * 3)),
}


@pytest.mark.parametrize("kind", ["array", "tensor", "gray"])
def test_pictures_of_bytes_have_their_channels_first(kind):
    pixels = np.zeros((8, 9, 1 if kind == "gray" else 3), dtype=np.uint8)
    given = torch.from_numpy(pixels) if kind == "tensor" else pixels
    with pytest.raises(ValueError, match=r"item 0 of the training set has the shape \(8, 9, [13]\).*channels last"):
        read_dataset([(given, 0)], "training set")
    for other in (pixels.transpose(2, 0, 1), pixels.astype(np.float32), pixels[:3]):  # a picture, no bytes, not clear
        inputs, _ = read_dataset([(other, 0)], "training set")
        assert inputs.shape[1:] == other.shape


def test_arrays_that_cannot_be_written_to_are_read_without_a_warning():
    pixels = np.zeros((1, 8, 9), dtype=np.uint8)
    pixels.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs, _ = read_dataset([(pixels, 0)], "training set")
    assert inputs.shape == (1, 1, 8, 9)


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_is_read_as_it_looks(kind):
    picture, expected = PICTURES[kind]
    inputs, _ = read_dataset([(picture, 0)], "training set")
    assert inputs.dtype == torch.uint8
    assert np.array_equal(inputs[0].numpy(), expected)


def test_an_item_that_cannot_be_read_is_named():
    class Damaged(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, place):
            if place == 3:
                raise OSError("image file is truncated")
            return torch.zeros(2), 0

    with pytest.raises(OSError, match="truncated") as caught:
        read_dataset(Damaged(), "test set")
    assert caught.value.__notes__ == ["while item 3 of the test set was read"]


class Endless(Dataset):
    """A data set that begins again whenever it is at its end."""

    def __init__(self, length):
        self.length, self.read = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, place):
        self.read += 1
        assert self.read < 20
        return torch.zeros(1000), place % 3


@pytest.mark.parametrize("length", [sys.maxsize, 10**11])
def test_a_data_set_without_an_end_is_refused(length):
    own = Endless(length)
    with pytest.raises(ValueError, match=f"training set has a length of {length}: give it a __len__"):
        FromDatasets(IID(2), train=own).setup()
    assert own.read == 0
    with pytest.raises(ValueError, match="data set has a length of"):
        classes_of(own)


def test_a_loader_without_an_end_is_refused():
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader, SequentialSampler

    class Project(LightningDataModule):
        def train_dataloader(self):
            own = Endless(sys.maxsize)
            return DataLoader(own, batch_size=2, sampler=SequentialSampler(own))

    with pytest.raises(ValueError, match="the data set has a length of 9223372036854775807"):
        FromLoaders(IID(2), datamodule=Project()).setup()
