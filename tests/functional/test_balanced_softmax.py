import math

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from pfl_lightning.functional import balanced_softmax_loss

NAN = float("nan")
LABELS = torch.tensor([0, 2, 2, 3, 0])


def draw(seed=0, dtype=torch.float64):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_loss(scores, labels, counts):
    """-log( n_y exp(s_y) / sum_c n_c exp(s_c) ), the mean over the samples whose class has a count."""
    total = 0.0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        if counts[label] > 0:
            shares = [n * math.exp(s) if n > 0 else 0.0 for n, s in zip(counts, row, strict=True)]
            total -= math.log(shares[label] / sum(shares))
    return total / len(scores)


@pytest.mark.parametrize("counts", [[5, 1, 20, 3], [5, 0, 20, 3], [0.25, 0.0, 0.5, 0.25], [5, 1, 0, 3], [0, 0, 0, 0]])
def test_equals_a_slow_loop(counts):
    value = balanced_softmax_loss(draw(), LABELS, torch.tensor(counts))
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(slow_loss(draw(), LABELS, counts), rel=1e-12)


def test_equal_counts_are_the_plain_cross_entropy():
    torch.testing.assert_close(
        balanced_softmax_loss(draw(), LABELS, torch.full((4,), 7)), F.cross_entropy(draw(), LABELS)
    )


@pytest.mark.parametrize("counts", [[5, 1, 20, 3], [5, 0, 20, 3], [5, 1, 0, 3]])
def test_gradient(counts):
    scores = draw().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: balanced_softmax_loss(s, LABELS, torch.tensor(counts)), scores)


@pytest.mark.parametrize("filler", [0.0, 1e30, NAN, float("inf")])
def test_classes_never_seen_leak_nothing(filler):
    scores = draw()
    scores[:, 1] = filler
    scores.requires_grad_()
    value = balanced_softmax_loss(scores, LABELS, torch.tensor([5, 0, 20, 3]))
    value.backward()
    assert value.item() == pytest.approx(slow_loss(draw(), LABELS, [5, 0, 20, 3]))
    assert scores.grad.isfinite().all()
    assert not scores.grad[:, 1].any()


def test_samples_of_a_class_without_count_contribute_zero():
    scores = draw().requires_grad_()
    balanced_softmax_loss(scores, LABELS, torch.tensor([5, 1, 0, 3])).backward()
    assert not scores.grad[LABELS == 2].any()
    assert scores.grad[LABELS != 2].any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_single(dtype):
    scores, counts = draw(dtype=dtype), torch.tensor([100_000, 0, 3, 70_000])  # beyond the largest float16
    with torch.autocast("cpu", torch.bfloat16):
        value = balanced_softmax_loss(scores, LABELS, counts)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(slow_loss(scores, LABELS, counts.tolist()), rel=1e-5)


def test_empty_batch_is_zero():
    assert balanced_softmax_loss(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.ones(4)).item() == 0.0


def test_vectorizes_over_clients():
    scores = torch.stack([draw(seed) for seed in range(2)])
    labels, counts = torch.stack([LABELS, LABELS.flip(0)]), torch.tensor([[5, 0, 20, 3], [1, 1, 0, 3]])
    gradients = vmap(grad(balanced_softmax_loss))(scores, labels, counts)
    for client in range(2):
        alone = grad(balanced_softmax_loss)(scores[client], labels[client], counts[client])
        torch.testing.assert_close(gradients[client], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(5, 4, 1)}, r"scores must be floating point of shape \(N, C\)"),
        ({"scores": torch.zeros(5, 4, dtype=torch.long)}, "scores must be floating point"),
        ({"labels": LABELS[:4]}, r"labels must be integers of shape \(5,\), got torch.int64 of .*4"),
        ({"labels": LABELS.double()}, "labels must be integers"),
        ({"class_counts": torch.ones(5)}, "class_counts must be 4 numbers"),
        ({"class_counts": torch.ones(4, dtype=torch.bool)}, "class_counts must be 4 numbers"),
    ],
)
def test_rejects_bad_input(change, message):
    arguments = {"scores": draw(), "labels": LABELS, "class_counts": torch.ones(4)} | change
    with pytest.raises(ValueError, match=message):
        balanced_softmax_loss(**arguments)
