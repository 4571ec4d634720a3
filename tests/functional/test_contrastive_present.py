"""The contrastive loss with samples left out, and NT-Xent against lightly's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from pfl_lightning.functional import supervised_contrastive_loss

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
masks = st.lists(st.booleans(), min_size=6, max_size=6).map(torch.tensor)


def draw(views=2, seed=0):
    shape = (6, 4) if views is None else (6, views, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(present=masks, views=st.sampled_from([None, 1, 2, 3]), labeled=st.booleans(), normalize=st.booleans())
@settings(max_examples=60, deadline=None)
def test_is_the_loss_of_those_that_are_present(present, views, labeled, normalize):
    labeled = labeled or views in (None, 1)
    features = draw(views).requires_grad_()
    own = LABELS[present] if labeled else None
    alone = supervised_contrastive_loss(features[present], own, 0.3, 0.07, normalize)
    (expected,) = torch.autograd.grad(alone, features)
    value = supervised_contrastive_loss(features, LABELS if labeled else None, 0.3, 0.07, normalize, present)
    (gradient,) = torch.autograd.grad(value, features)
    torch.testing.assert_close(value, alone)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
@pytest.mark.parametrize("labels", [LABELS, None])
def test_what_is_left_out_leaks_no_nan(labels, filler):
    present = torch.tensor([True, False, True, True, False, True])
    features = draw()
    features[~present] = filler
    features.requires_grad_()
    value = supervised_contrastive_loss(features, labels, present=present)
    value.backward()
    expected = supervised_contrastive_loss(features[present], None if labels is None else labels[present])
    torch.testing.assert_close(value, expected)
    assert features.grad.isfinite().all()
    assert not features.grad[~present].any()


def test_gradient():
    present, features = torch.tensor([True, False, True, True, False, False]), draw().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: supervised_contrastive_loss(f, None, 0.3, present=present), features)


def test_masks_vectorize_over_clients():
    features = torch.stack([draw(seed=seed) for seed in range(3)])
    present = torch.tensor([[True] * 6, [False] * 6, [True, False] * 3])

    def loss(f, p):
        return supervised_contrastive_loss(f, None, 0.2, present=p)

    values, gradients = vmap(loss)(features, present), vmap(grad(loss))(features, present)
    for client in range(3):
        torch.testing.assert_close(values[client], loss(features[client], present[client]))
        torch.testing.assert_close(gradients[client], grad(loss)(features[client], present[client]))
    assert values[1].item() == 0.0


@pytest.mark.parametrize("temperature", [0.07, 0.2, 0.5])
@pytest.mark.parametrize("present", [None, torch.ones(6, dtype=torch.bool)])
def test_nt_xent_is_that_of_lightly(temperature, present):
    reference = pytest.importorskip("lightly.loss").NTXentLoss(temperature)
    features = draw().requires_grad_()
    expected = reference(features[:, 0], features[:, 1])
    value = supervised_contrastive_loss(features, None, temperature, present=present)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, features)[0] for loss in (value, expected)))


@pytest.mark.parametrize(
    "present", [torch.ones(5, dtype=torch.bool), torch.ones(6), torch.ones(6, 2, dtype=torch.bool)]
)
def test_rejects_a_bad_mask(present):
    with pytest.raises(ValueError, match=r"present must be bool of shape \(6,\), got"):
        supervised_contrastive_loss(draw(), LABELS, present=present)
