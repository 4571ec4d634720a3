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


@pytest.mark.parametrize("others", [BYTES.float(), BYTES.long(), BYTES.float() - 1])
def test_bytes_and_numbers_of_another_scale_are_refused(others):
    """Bytes alone are divided by 255."""
    with pytest.raises(ValueError, match=r"training inputs are torch.uint8, test inputs .* so that both would not be"):
        samples(BYTES, others)
    with pytest.raises(ValueError, match=r"the training inputs go from -?\d+ to 25\d"):
        samples(others, BYTES)


def test_numbers_of_the_scale_of_bytes_are_taken():
    for scaled in (BYTES / 255, BYTES.double() / 255, torch.full_like(BYTES, torch.nan, dtype=torch.float32)):
        assert samples(BYTES, scaled).test_inputs is scaled
        assert samples(scaled, BYTES).train_inputs is scaled
    assert len(samples(BYTES.float(), BYTES.long()).train_inputs) == 2  # neither is divided


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
