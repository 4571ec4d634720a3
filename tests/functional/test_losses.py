import math

import pytest
import torch
from torch.func import functional_call, grad, vmap

from pfl_lightning.functional import alignment_loss, proximal_term

NAN = float("nan")


def batch(samples=7, features=5, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, features, generator=generator, dtype=torch.float64),
        torch.randperm(samples, generator=generator) % classes,
        torch.randn(classes, features, generator=generator, dtype=torch.float64),
    )


def slow_alignment(features, labels, prototypes, present, norm):
    total = 0.0
    for row, label in zip(features.tolist(), labels.tolist(), strict=True):
        if present is not None and not present[label]:
            continue
        squares = sum((a - b) ** 2 for a, b in zip(row, prototypes[label].tolist(), strict=True))
        total += squares / len(row) if norm == "mse" else math.sqrt(squares)
    return total / len(features)


@pytest.mark.parametrize("norm", ["mse", "l2"])
@pytest.mark.parametrize("present", [None, [True, False, True, True], [False] * 4])
def test_alignment_equals_a_slow_loop(norm, present):
    features, labels, prototypes = batch()
    mask = None if present is None else torch.tensor(present)
    value = alignment_loss(features, labels, prototypes, mask, norm).item()
    assert value == pytest.approx(slow_alignment(features, labels, prototypes, present, norm), abs=1e-12)
    if present is not None and not any(present):
        assert value == 0.0


@pytest.mark.parametrize("norm", ["mse", "l2"])
def test_alignment_gradient(norm):
    features, labels, prototypes = batch()
    present = torch.tensor([True, False, True, True])
    features.requires_grad_()
    prototypes.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, c: alignment_loss(f, labels, c, present, norm), (features, prototypes))


@pytest.mark.parametrize("norm", ["mse", "l2"])
@pytest.mark.parametrize("filler", [NAN, float("inf")])
def test_absent_prototypes_leak_no_nan(norm, filler):
    features, labels, prototypes = batch()
    present = torch.tensor([True, False, True, True])
    assert (labels == 1).any()
    clean = prototypes.clone()
    prototypes[1] = filler
    features.requires_grad_()
    prototypes.requires_grad_()
    loss = alignment_loss(features, labels, prototypes, present, norm)
    loss.backward()
    assert loss.item() == alignment_loss(features, labels, clean, present, norm).item()
    assert features.grad.isfinite().all()
    assert prototypes.grad.isfinite().all()
    assert torch.equal(features.grad[labels == 1], torch.zeros_like(features.grad[labels == 1]))
    assert (features.grad[labels != 1] != 0).any()


def test_l2_gradient_is_zero_at_the_prototype():
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    prototypes = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    loss = alignment_loss(features, torch.tensor([0, 1]), prototypes, norm="l2")
    loss.backward()
    assert loss.item() == pytest.approx(2.5)
    torch.testing.assert_close(features.grad, torch.tensor([[0.0, 0.0], [0.3, 0.4]]))


def test_half_precision_does_not_overflow():
    features = torch.full((2, 3), 300.0, dtype=torch.float16)
    loss = alignment_loss(features, torch.tensor([0, 0]), torch.zeros(1, 3, dtype=torch.float16))
    assert loss.item() == pytest.approx(90000.0)


def test_empty_batch_is_zero():
    assert alignment_loss(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), torch.zeros(2, 3)).item() == 0.0


@pytest.mark.parametrize("norm", ["mse", "l2"])
def test_alignment_vectorizes_over_clients(norm):
    clients = [batch(seed=seed) for seed in range(3)]
    present = torch.tensor([[True, False, True, True], [True] * 4, [False] * 4])
    features, labels, prototypes = (torch.stack(parts) for parts in zip(*clients, strict=True))
    prototypes[0, 1] = NAN

    def loss(f, y, c, p):
        return alignment_loss(f, y, c, p, norm)

    gradients = vmap(grad(loss))(features, labels, prototypes, present)
    for client in range(3):
        one = features[client].clone().requires_grad_()
        loss(one, labels[client], prototypes[client], present[client]).backward()
        torch.testing.assert_close(gradients[client], one.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(7, 5, 1)}, r"features must be floating point of shape \(N, d\)"),
        ({"labels": torch.zeros(6, dtype=torch.long)}, r"labels must be integers of shape \(7,\), got .*\(6,\)"),
        ({"labels": torch.zeros(7)}, "labels must be integers"),
        ({"prototypes": torch.zeros(4, 6)}, r"shape \(C, 5\)"),
        ({"present": torch.ones(3, dtype=torch.bool)}, r"present must be bool of shape \(4,\)"),
        ({"present": torch.ones(4)}, "present must be bool"),
        ({"norm": "l1"}, "'mse' .* or 'l2'"),
    ],
)
def test_alignment_rejects_bad_input(change, message):
    features, labels, prototypes = batch()
    arguments = {"features": features, "labels": labels, "prototypes": prototypes} | change
    with pytest.raises(ValueError, match=message):
        alignment_loss(**arguments)


def named(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(2, 3, generator=generator, dtype=torch.float64),
        "bias": torch.randn(2, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("squared", [True, False])
def test_proximal_equals_a_slow_loop(squared):
    params, reference = named(0), named(1)
    total = 0.0
    for name in params:
        for a, b in zip(params[name].flatten().tolist(), reference[name].flatten().tolist(), strict=True):
            total += (a - b) ** 2
    expected = total if squared else math.sqrt(total)
    assert proximal_term(params, reference, squared).item() == pytest.approx(expected, abs=1e-12)
    reordered = dict(reversed(reference.items()))
    assert proximal_term(params, reordered, squared).item() == pytest.approx(expected, abs=1e-12)
    listed = proximal_term((p for p in params.values()), list(reference.values()), squared)
    assert listed.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("squared", [True, False])
def test_proximal_gradient(squared):
    params, reference = named(0), named(1)
    tensors = tuple(p.requires_grad_() for p in params.values())
    assert torch.autograd.gradcheck(lambda *p: proximal_term(p, list(reference.values()), squared), tensors)


@pytest.mark.parametrize("squared", [True, False])
def test_proximal_gradient_is_zero_at_the_reference(squared):
    params = {name: p.requires_grad_() for name, p in named(0).items()}
    value = proximal_term(params, named(0), squared)
    value.backward()
    assert value.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params.values())


def test_losses_vectorize_over_client_models():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    params = {name: torch.stack([p.detach() + k for k in range(2)]) for name, p in net.named_parameters()}
    reference = {name: p.detach() for name, p in net.named_parameters()}
    x, y, prototypes = torch.randn(2, 6, 4), torch.randint(3, (2, 6)), torch.randn(3, 3)

    def loss(p, inputs, labels):
        features = functional_call(net, p, (inputs,))
        return alignment_loss(features, labels, prototypes) + proximal_term(p, reference, squared=False)

    gradients = vmap(grad(loss))(params, x, y)
    for client in range(2):
        alone = grad(loss)({name: p[client] for name, p in params.items()}, x[client], y[client])
        for name in params:
            torch.testing.assert_close(gradients[name][client], alone[name])
            assert gradients[name].isfinite().all()


def test_proximal_rejects_bad_input():
    params = named(0)
    with pytest.raises(ValueError, match=r"not in both are \[\('bias'"):
        proximal_term(params, {"weight": params["weight"]})
    with pytest.raises(ValueError, match=r"not in both are .*'weight', torch.Size\(\[2, 3\]\)"):
        proximal_term(params, {**params, "weight": params["weight"].T})
    with pytest.raises(ValueError, match="at least one tensor"):
        proximal_term({}, {})
    with pytest.raises(ValueError, match="same names"):
        proximal_term(list(params.values()), list(params.values())[:1])
    with pytest.raises(ValueError, match="same names"):
        proximal_term(params, list(params.values()))
