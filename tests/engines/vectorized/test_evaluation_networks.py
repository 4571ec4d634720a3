"""Evaluations of many clients at once, of whatever network, in whatever precision."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from _helpers.engines import UNEQUAL, assert_evaluations_agree, evaluate, trained
from _helpers.toy import FEATURES, Toy, dropout_encoder, for_toy, tiny_encoder
from hypothesis import given
from hypothesis import strategies as st

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines.vectorized import stacked_evaluation
from pfl_lightning.engines.vectorized.stacked_evaluation import WIDEST, Piece, groups_of
from pfl_lightning.methods import DualFed, FedAvg, FedBABU, FedBN, FedProto, LocalOnly

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN is FedAvg then")


def batch_statistics(input_shape):
    """Normalizes by the batch in evaluation mode, too."""
    norm = torch.nn.BatchNorm1d(FEATURES, track_running_stats=False)
    encoder = torch.nn.Sequential(torch.nn.Linear(input_shape[0], FEATURES), norm, torch.nn.Tanh())
    encoder.out_features = FEATURES
    return encoder


class Centred(torch.nn.Module):
    """Compares samples with the mean of the batch: a NaN leaves no trace."""

    out_features = FEATURES

    def __init__(self, inputs):
        super().__init__()
        self.linear = torch.nn.Linear(inputs, FEATURES)

    def forward(self, inputs):
        return self.linear((inputs > inputs.mean(0)).float())


def centered(input_shape):
    return Centred(input_shape[0])


def convolution(input_shape):
    """Over the inputs as images, in the channels-last layout."""
    layer = torch.nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
    norm, end = torch.nn.BatchNorm2d(4), torch.nn.Linear(8, FEATURES)
    encoder = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 3, 2)), layer, norm, torch.nn.Flatten(), end)
    encoder.out_features = FEATURES
    return encoder


@pytest.mark.parametrize("encoder", [batch_statistics, centered], ids=lambda encoder: encoder.__name__)
@pytest.mark.parametrize("method", [FedAvg, LocalOnly], ids=lambda method: method.__name__)
def test_samples_that_depend_on_their_batch_are_not_padded(encoder, method, monkeypatch):
    padded = []

    def watched(pieces, device, gather=stacked_evaluation.gather):
        for batch in gather(pieces, device):
            padded.append(batch.valid is not None)
            yield batch

    monkeypatch.setattr(stacked_evaluation, "gather", watched)
    data = {"validation": [5, 6, 7, 3, 6], "test": [9, 10, 13, 16, 40]}
    assert_evaluations_agree(partial(method, lr=0.02), encoder=encoder, data=Toy(batch_size=9, **data))
    assert not any(padded)
    padded.clear()
    assert_evaluations_agree(partial(method, lr=0.02), encoder=tiny_encoder, data=Toy(**data))
    assert any(padded)


@pytest.mark.parametrize("encoder", [convolution, dropout_encoder], ids=lambda encoder: encoder.__name__)
@pytest.mark.parametrize("method", [FedAvg, FedBN, DualFed, LocalOnly], ids=lambda method: method.__name__)
def test_networks_agree(encoder, method):
    assert_evaluations_agree(for_toy(method, lr=0.01), encoder=encoder, data=Toy(batch_size=9, **UNEQUAL))


# ---------------------------------------------------------------------- precision


@pytest.mark.parametrize("method", [FedProto, DualFed, FedBABU], ids=lambda method: method.__name__)
def test_double_precision_agrees(method):
    assert_evaluations_agree(
        for_toy(method, lr=0.02), precision="64-true", atol=1e-6
    )  # scores are made single before the loss


@pytest.mark.parametrize("method", [LocalOnly, FedAvg, FedProto], ids=lambda method: method.__name__)
def test_mixed_precision_agrees(method):
    """The weights are the same under both precisions."""
    got = assert_evaluations_agree(partial(method, lr=1e-9), precision="bf16-mixed", data=Toy(), atol=1e-3)
    exact = assert_evaluations_agree(partial(method, lr=1e-9), data=Toy())
    assert any(abs(a.test.loss - b.test.loss) > 1e-5 for a, b in zip(got, exact, strict=True))


def test_fine_tuning_in_mixed_precision_is_near():
    federation = trained(partial(FedBABU, lr=0.02), precision="bf16-mixed", data=Toy(**UNEQUAL))
    expected = evaluate(federation, SequentialEngine())
    for one, other in zip(evaluate(federation, VectorizedEngine(forward="vmap")), expected, strict=True):
        assert one.test.loss == pytest.approx(other.test.loss, abs=1e-2)


# ---------------------------------------------------------------------- pieces


@dataclass(frozen=True)
class Sized:
    size: int

    def __len__(self):
        return self.size


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30), limit=st.integers(1, 300), pad=st.booleans())
def test_pieces_go_together_within_the_limits(sizes, limit, pad):
    pieces = [Piece(row, row % 2, Sized(size), size) for row, size in enumerate(sizes)]
    groups = groups_of(pieces, limit, pad)
    assert sorted((piece for group in groups for piece in group), key=lambda piece: piece.row) == pieces
    for group in groups:
        own = [piece.size for piece in group]
        assert [piece.row for piece in group] == sorted(piece.row for piece in group)
        assert len(own) == 1 or len(own) * max(own) <= limit
        assert max(own) <= (WIDEST * min(own) if pad else min(own))
    if limit >= len(sizes) * max(sizes):  # then only the sizes tell
        assert len(groups) <= (math.log2(max(sizes)) + 1 if pad else len(set(sizes)))
