"""Calibre's losses on prototypes of clusters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from pfl_lightning.functional import (
    cluster_means,
    prototype_contrastive_loss,
    prototype_meta_loss,
    supervised_contrastive_loss,
)

CLUSTERS = 5
FIRST, SECOND = [0, 1, 1, 2, 0, 4, 2], [0, 2, 3, 1, 4, 0, 3]  # the second view lacks none but 3 is not in the first


def views(seed=0, features=4, dtype=torch.float64):
    """Two views of seven samples, and their clusters."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 7, features, generator=generator, dtype=torch.float64).to(dtype)
    return (*values, torch.tensor(FIRST), torch.tensor(SECOND))


def slow_means(features, labels):
    """Means by cluster, of the clusters that have members."""
    groups = {}
    for row, label in zip(features.tolist(), labels.tolist(), strict=True):
        groups.setdefault(label, []).append(row)
    return {k: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for k, rows in groups.items()}


def unit(row):
    norm = math.sqrt(sum(v * v for v in row))
    return [v / norm for v in row]


def square_distance(a, b):
    return sum((u - v) ** 2 for u, v in zip(a, b, strict=True))


def slow_meta_loss(support, queries, support_labels, query_labels):
    prototypes = {k: unit(row) for k, row in slow_means(support, support_labels).items()}
    losses = []
    for row, label in zip(queries.tolist(), query_labels.tolist(), strict=True):
        if label in prototypes:
            scores = {k: -square_distance(unit(row), prototype) for k, prototype in prototypes.items()}
            losses.append(math.log(sum(math.exp(score) for score in scores.values())) - scores[label])
    return sum(losses) / len(losses) if losses else 0.0


def kept_prototypes(first, second, first_labels, second_labels):
    """Means of the clusters that both views have, as two tensors."""
    means = slow_means(first, first_labels), slow_means(second, second_labels)
    both = sorted(means[0].keys() & means[1].keys())
    return [torch.tensor([own[k] for k in both], dtype=torch.float64).reshape(len(both), -1) for own in means]


LOSSES = {"meta": prototype_meta_loss, "contrastive": prototype_contrastive_loss}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
labels_of = st.lists(st.integers(0, CLUSTERS - 1), min_size=7, max_size=7).map(torch.tensor)


def test_means_are_those_of_a_slow_loop():
    features, _, labels, _ = views()
    means, present = cluster_means(features, labels, CLUSTERS)
    assert present.tolist() == [True, True, True, False, True]
    for cluster in range(CLUSTERS):
        expected = slow_means(features, labels).get(cluster, [0.0] * 4)
        assert means[cluster].tolist() == pytest.approx(expected)
    assert not cluster_means(features[:0], labels[:0], CLUSTERS)[0].any()


@given(first=labels_of, second=labels_of, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_meta_loss_equals_a_slow_loop(first, second, seed):
    support, queries, *_ = views(seed)
    value = prototype_meta_loss(support, queries, first, second, CLUSTERS)
    assert value.item() == pytest.approx(slow_meta_loss(support, queries, first, second), abs=1e-12)


@given(first=labels_of, second=labels_of, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_contrastive_loss_is_that_of_the_clusters_in_both_views(first, second, seed):
    arguments = (*views(seed)[:2], first, second)
    value = prototype_contrastive_loss(*arguments, CLUSTERS, temperature=0.3)
    pairs = torch.stack(kept_prototypes(*arguments), dim=1)
    assert value.item() == pytest.approx(supervised_contrastive_loss(pairs, None, 0.3).item(), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.2, 0.5])
@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4, 0, 1], FIRST])
def test_contrastive_loss_is_that_of_lightly(labels, temperature):
    reference = pytest.importorskip("lightly.loss").NTXentLoss(temperature)
    arguments = (*views()[:2], torch.tensor(labels), torch.tensor([4, 3, 2, 1, 0, 2, 2]))
    value = prototype_contrastive_loss(*arguments, CLUSTERS, temperature)
    assert value.item() == pytest.approx(reference(*kept_prototypes(*arguments)).item())


@each_loss
@given(first=labels_of, second=labels_of, order=st.permutations(range(7)), names=st.permutations(range(CLUSTERS)))
@settings(max_examples=40, deadline=None)
def test_order_and_numbers_do_not_matter(loss, first, second, order, names):
    e, o, *_ = views()
    expected = loss(e, o, first, second, CLUSTERS)
    names, order = torch.tensor(names), torch.tensor(order)
    torch.testing.assert_close(loss(e, o, names[first], names[second], CLUSTERS), expected)
    torch.testing.assert_close(loss(e[order], o, first[order], second, CLUSTERS), expected)
    torch.testing.assert_close(loss(e, o[order], first, second[order], CLUSTERS), expected)
    torch.testing.assert_close(loss(e, o, first, second, CLUSTERS + 3), expected)
    torch.testing.assert_close(cluster_means(e, names[first], CLUSTERS)[0][names], cluster_means(e, first, CLUSTERS)[0])


@each_loss
def test_gradient(loss):
    first, second, *labels = views()
    tensors = first.requires_grad_(), second.requires_grad_()
    assert torch.autograd.gradcheck(lambda e, o: loss(e, o, *labels, CLUSTERS), tensors)
    assert torch.autograd.gradgradcheck(lambda e, o: loss(e, o, *labels, CLUSTERS), tensors)


def test_gradient_reaches_what_counts_and_nothing_else():
    first, second, *labels = views()

    def touched(loss):
        return [own.any(dim=1).tolist() for own in grad(loss, argnums=(0, 1))(first, second, *labels, CLUSTERS)]

    in_meta, in_contrastive = touched(prototype_meta_loss), touched(prototype_contrastive_loss)
    assert all(in_meta[0])  # every prototype is one that queries are told from
    assert in_meta[1] == [label != 3 for label in SECOND]
    assert in_contrastive[0] == [True] * 7
    assert in_contrastive[1] == [label != 3 for label in SECOND]
    swapped = grad(prototype_contrastive_loss, argnums=(0, 1))(second, first, *labels[::-1], CLUSTERS)
    assert swapped[0].any(dim=1).tolist() == in_contrastive[1]


@each_loss
def test_what_is_left_out_does_not_matter(loss):
    first, second, *labels = views()
    expected = loss(first, second, *labels, CLUSTERS)
    second[labels[1] == 3] += 100.0
    torch.testing.assert_close(loss(first, second, *labels, CLUSTERS), expected)


@each_loss
def test_without_a_common_cluster_it_is_zero(loss):
    first, second, *_ = views(dtype=torch.float32)
    first.requires_grad_()
    value = loss(first, second, torch.zeros(7, dtype=torch.long), torch.ones(7, dtype=torch.long), CLUSTERS)
    value.backward()
    assert value.item() == 0.0
    assert not first.grad.any()


@each_loss
def test_zero_vectors_give_finite_values_and_gradients(loss):
    first, second, *labels = views(dtype=torch.float32)
    first[0] = first[4] = second[0] = 0.0  # a whole cluster, and a sample
    first.requires_grad_()
    second.requires_grad_()
    value = loss(first, second, *labels, CLUSTERS)
    value.backward()
    assert value.isfinite()
    assert first.grad.isfinite().all()
    assert second.grad.isfinite().all()


@each_loss
@pytest.mark.parametrize("autocast", [False, True])
def test_vectorizes_over_clients(loss, autocast):
    e, o, first, second = (torch.stack(parts) for parts in zip(*(views(seed) for seed in range(3)), strict=True))
    first[1], second[2] = 1, torch.tensor([3] * 7)

    def of_client(*tensors):
        return loss(*tensors, CLUSTERS)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = vmap(of_client)(e, o, first, second)
        gradients = vmap(grad(of_client, argnums=(0, 1)))(e, o, first, second)
    for client in range(3):
        own = e[client], o[client], first[client], second[client]
        torch.testing.assert_close(values[client], of_client(*own))
        for found, expected in zip(gradients, grad(of_client, argnums=(0, 1))(*own), strict=True):
            torch.testing.assert_close(found[client], expected)


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_computed_in_single(loss, dtype, autocast):
    first, second, *labels = views(features=512, dtype=dtype)
    first, second = first * 200, second * 200
    assert first.double().square().sum(dim=1).min() > torch.finfo(torch.float16).max
    first.requires_grad_()
    expected = loss(first.detach().double(), second.double(), *labels, CLUSTERS)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(first, second, *labels, CLUSTERS)
        value.backward()
        single = grad(loss)(first.detach().float(), second.float(), *labels, CLUSTERS)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    wanted = grad(loss)(first.detach().double(), second.double(), *labels, CLUSTERS)
    torch.testing.assert_close(single.double(), wanted, rtol=1e-4, atol=1e-7 * wanted.abs().max().item() + 1e-8)
    assert first.grad.dtype == dtype
    assert first.grad.isfinite().all()


@each_loss
def test_looks_at_no_values(loss):
    assert loss(*(part.to("meta") for part in views()), CLUSTERS).shape == ()


@each_loss
@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(7), r"floating point of shape \(N, d\), got torch.float32 of shape \(7,\)"),
        (1, torch.zeros(7, 4, dtype=torch.long), "floating point of shape"),
        (1, torch.zeros(7, 3), r"shape \(N, 4\)"),
        (
            2,
            torch.zeros(6, dtype=torch.long),
            r"labels must be integers of shape \(7,\), got torch.int64",
        ),
        (3, torch.zeros(7), "must be integers of shape .* got torch.float32"),
        (4, 0, "num_clusters must be at least 1, got 0"),
    ],
)
def test_rejects_bad_input(loss, position, value, message):
    arguments = [*views(), CLUSTERS]
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        loss(*arguments)


def test_rejects_a_bad_temperature():
    with pytest.raises(ValueError, match=r"temperature must be finite and positive, got 0\.0"):
        prototype_contrastive_loss(*views(), CLUSTERS, temperature=0.0)
