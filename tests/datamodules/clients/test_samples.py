"""What samples of one data set must have in common."""

import numpy as np
import pytest
import torch
from PIL import Image

from pfl_lightning.datamodules import IID, FromDatasets, Samples

BYTES = torch.tensor([[[[0, 255]]], [[[51, 102]]]], dtype=torch.uint8)
LABELS = torch.tensor([0, 1])


def samples(train, test):
    return Samples(train, LABELS, ("a", "b"), test, LABELS)


@pytest.mark.parametrize("others", [BYTES.float(), BYTES.long(), BYTES / 255])
def test_bytes_and_other_numbers_are_refused(others):
    """Bytes alone are divided by 255."""
    for pair in ((BYTES, others), (others, BYTES)):
        with pytest.raises(ValueError, match=r"training inputs are torch.\w+ of shape .*: both must be the same"):
            samples(*pair)


def test_gray_images_of_bytes_get_their_channel():
    """Their rows are not channels: arrays, tensors and pictures are the same data."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 5, 6), dtype=np.uint8)
    train, test = pixels[:30] / 255, pixels[30:] / 255
    expected = torch.from_numpy((test - train.mean()) / train.std()).float().unsqueeze(1)
    for kind in (np.asarray, torch.from_numpy, Image.fromarray):
        pairs = [(kind(image), place % 10) for place, image in enumerate(pixels)]
        data = FromDatasets(IID(num_clients=1), train=pairs[:30], test=pairs[30:], validation_share=0.0)
        data.setup()
        inputs, _ = next(iter(data.client_data(0).test.loader(batch_size=10)))
        torch.testing.assert_close(inputs, expected)
        assert data.input_shape == (1, 5, 6)


def test_other_inputs_keep_their_shape():
    for inputs in (torch.rand(2, 5, 6), BYTES.flatten(1), torch.ones(2, 5, 6, dtype=torch.int64)):
        assert samples(inputs, inputs).train_inputs is inputs
