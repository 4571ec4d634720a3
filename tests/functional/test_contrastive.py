import math

import pytest
import torch
from torch.func import grad, vmap

from pfl_lightning.functional import supervised_contrastive_loss

LABELS = [0, 1, 0, 2, 1, 0]  # class 2 has one sample


def draw(samples=6, views=2, features=4, seed=0, dtype=torch.float64):
    shape = (samples, features) if views is None else (samples, views, features)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_loss(features, labels, temperature, base_temperature=None, normalize=True):
    """Eq. (2) of Khosla et al., term by term."""
    views = features.unsqueeze(1).tolist() if features.ndim == 2 else features.tolist()
    owners = [sample for sample, rows in enumerate(views) for _ in rows]
    vectors = [row for rows in views for row in rows]
    if normalize:
        vectors = [[v / math.sqrt(sum(u * u for u in row)) for v in row] for row in vectors]
    group = owners if labels is None else [int(labels[sample]) for sample in owners]

    def similarity(i, j):
        return sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)) / temperature

    total = 0.0
    for i in range(len(vectors)):
        others = [a for a in range(len(vectors)) if a != i]
        positives = [p for p in others if group[p] == group[i]]
        if positives:
            contrast = math.log(math.fsum(math.exp(similarity(i, a)) for a in others))
            total += sum(contrast - similarity(i, p) for p in positives) / len(positives)
    scale = 1.0 if base_temperature is None else temperature / base_temperature
    return scale * total / len(vectors)


@pytest.mark.parametrize(("views", "labeled"), [(None, True), (1, True), (2, True), (3, True), (2, False), (3, False)])
@pytest.mark.parametrize(("temperature", "base"), [(0.07, None), (0.5, 0.07), (100.0, 0.07), (0.2, 0.2)])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_a_slow_loop(views, labeled, temperature, base, normalize):
    features, labels = draw(views=views), torch.tensor(LABELS) if labeled else None
    value = supervised_contrastive_loss(features, labels, temperature, base, normalize)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(slow_loss(features, labels, temperature, base, normalize), rel=1e-12)


def test_closed_forms():
    one, other = [1.0, 0.0], [0.0, 1.0]
    # Views at their own axis: one positive at similarity 1 and two others at 0, for each of the four anchors.
    features = torch.tensor([[one, one], [other, other]], dtype=torch.float64)
    expected = math.log(1 + 2 * math.exp(-1 / 0.5))
    assert supervised_contrastive_loss(features, None, 0.5).item() == pytest.approx(expected)
    assert supervised_contrastive_loss(features, torch.tensor([3, 1]), 0.5).item() == pytest.approx(expected)
    # All equal, all of one class: every share is 1 / (M - 1).
    same = torch.ones(5, 2, 3, dtype=torch.float64)
    assert supervised_contrastive_loss(same, torch.zeros(5, dtype=torch.long)).item() == pytest.approx(math.log(9))
    # Two samples of a class have nothing but each other; of two classes, no positives.
    assert supervised_contrastive_loss(features[:, 0], torch.tensor([1, 1])).item() == 0.0
    assert supervised_contrastive_loss(features[:, 0], torch.tensor([0, 1])).item() == 0.0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("labels", [None, torch.tensor(LABELS)])
def test_gradient(labels, normalize):
    features = draw(features=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: supervised_contrastive_loss(f, labels, 0.3, None, normalize), features)


def test_one_label_per_sample_is_nt_xent():
    features = draw()
    torch.testing.assert_close(
        supervised_contrastive_loss(features, torch.arange(6)), supervised_contrastive_loss(features, None)
    )


def test_order_of_samples_and_views_does_not_matter():
    features, labels = draw(views=3), torch.tensor(LABELS)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    expected = supervised_contrastive_loss(features, labels)
    torch.testing.assert_close(supervised_contrastive_loss(features[order].flip(1), labels[order]), expected)


def test_anchors_without_positives_contribute_zero():
    features, labels = draw(views=None), torch.tensor(LABELS)
    features.requires_grad_()
    value = supervised_contrastive_loss(features, labels)
    # The lone sample is contrast for the others all the same, and counts in the mean.
    assert value.item() == pytest.approx(slow_loss(features.detach(), labels, 0.07))
    (gradient,) = torch.autograd.grad(value, features)
    assert gradient.isfinite().all()
    assert gradient[3].any()
    alone = supervised_contrastive_loss(features, torch.arange(6))
    (gradient,) = torch.autograd.grad(alone, features)
    assert alone.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 4), (0, 4), (0, 2, 4)])
def test_without_contrast_it_is_zero(shape):
    features = torch.ones(shape, requires_grad=True)
    value = supervised_contrastive_loss(features, torch.zeros(shape[0], dtype=torch.long))
    value.backward()
    assert value.item() == 0.0
    assert not features.grad.any()


def test_zero_vectors_give_finite_values_and_no_gradient():
    features = draw(dtype=torch.float32)
    features[2, 1] = 0.0
    features.requires_grad_()
    value = supervised_contrastive_loss(features, torch.tensor(LABELS))
    value.backward()
    assert value.isfinite()
    assert features.grad.isfinite().all()
    assert not features.grad[2, 1].any()


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_normalized_features_have_no_scale(scale):
    features, labels = draw(dtype=torch.float32), torch.tensor(LABELS)
    torch.testing.assert_close(
        supervised_contrastive_loss(features * scale, labels), supervised_contrastive_loss(features, labels)
    )


def gradient_of(features, *arguments):
    features = features.clone().requires_grad_()
    value = supervised_contrastive_loss(features, *arguments)
    value.backward()
    return value.detach(), features.grad


VARIANTS = [(0.07, None, True), (100.0, 0.07, False)]  # Khosla et al.; the published implementation of FedClassAvg


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_computed_in_single(variant, dtype, autocast):
    # Products of features of this size and number are beyond the largest float16, and bfloat16 has eight bits.
    features, labels = (draw(8, 2, 512) * 40 + 20).to(dtype), torch.tensor([0, 1] * 4)
    assert variant[2] or features.double().square().sum(-1).min() > torch.finfo(torch.float16).max
    expected, expected_gradient = gradient_of(features.double(), labels, *variant)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value, gradient = gradient_of(features, labels, *variant)
        single = gradient_of(features.float(), labels, *variant)[0]
    assert value.dtype == single.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(value, single)
    resolution = 4 * torch.finfo(dtype).eps * expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0, atol=resolution + 1e-7)


def test_double_stays_double_under_autocast():
    features, labels = draw(), torch.tensor(LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            supervised_contrastive_loss(features, labels, 0.3), supervised_contrastive_loss(features, labels, 0.3)
        )
        value = supervised_contrastive_loss(features, labels, 0.3).item()
    assert value == pytest.approx(slow_loss(features, labels, 0.3), rel=1e-12)


def test_far_apart_features_do_not_overflow():
    features = torch.tensor([[200.0, 0.0], [-200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    value = supervised_contrastive_loss(features, torch.tensor([0, 0, 1]), normalize=False)
    value.backward()
    # exp(-40000 / 0.07) is zero in any format: the loss is the difference of similarities, 40000 / 0.07, twice.
    assert value.item() == pytest.approx(2 * 40000 / 0.07 / 3, rel=1e-6)
    assert features.grad.isfinite().all()


@pytest.mark.parametrize("labeled", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_vectorizes_over_clients(labeled, autocast):
    features = torch.stack([draw(seed=seed, dtype=torch.float32) for seed in range(3)])
    labels = torch.tensor([LABELS, list(range(6)), [0] * 6])

    def loss(f, y):
        return supervised_contrastive_loss(f, y if labeled else None, 0.2)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values, gradients = vmap(loss)(features, labels), vmap(grad(loss))(features, labels)
    for client in range(3):
        value, gradient = gradient_of(features[client], labels[client] if labeled else None, 0.2)
        torch.testing.assert_close(values[client], value)
        torch.testing.assert_close(gradients[client], gradient)


def test_looks_at_no_values():
    value = supervised_contrastive_loss(draw().to("meta"), torch.tensor(LABELS, device="meta"))
    assert value.shape == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(6)}, r"shape \(N, V, d\), got torch.float32 of shape \(6,\)"),
        ({"features": torch.zeros(6, 2, 2, 2)}, r"\(N, V, d\)"),
        ({"features": torch.zeros(6, 4, dtype=torch.long)}, "floating point"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, r"labels must be integers of shape \(6,\), got .*\(5,\)"),
        ({"labels": torch.zeros(6, 2, dtype=torch.long)}, r"labels must be integers of shape \(6,\)"),
        ({"labels": torch.zeros(6)}, "labels must be integers .* got torch.float32"),
        ({"labels": torch.zeros(6, dtype=torch.bool)}, "labels must be integers .* got torch.bool"),
        ({"labels": None, "features": torch.zeros(6, 1, 4)}, "V >= 2"),
        ({"labels": None, "features": torch.zeros(6, 4)}, "V >= 2"),
        ({"temperature": 0.0}, "^temperature must be finite and positive, got 0.0"),
        ({"temperature": -1.0}, "^temperature"),
        ({"temperature": math.nan}, "^temperature"),
        ({"temperature": math.inf}, "^temperature"),
        ({"base_temperature": 0.0}, "^base_temperature must be finite and positive"),
    ],
)
def test_rejects_bad_input(change, message):
    arguments = {"features": draw(), "labels": torch.tensor(LABELS)} | change
    with pytest.raises(ValueError, match=message):
        supervised_contrastive_loss(**arguments)
