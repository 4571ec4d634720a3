"""What samples of one data set must have in common."""

import pytest
import torch

from pfl_lightning.datamodules import Samples

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
