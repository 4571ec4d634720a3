"""The bank of states in a broadcast, against lists of states, and its mean loss against a loop over samples."""

import math

import pytest
import torch
from _helpers.toy import CLASSES, INPUTS, Toy, dropout_encoder, normed_encoder, tiny_encoder
from torch import nn

from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods._bank import BankBroadcast, mean_loss, row_of, stacked


def states(count):
    """States with a matrix, a half-precision vector and a counter."""
    draws = torch.Generator().manual_seed(0)
    return [
        {
            "encoder.weight": torch.randn(3, 2, generator=draws),
            "head.bias": torch.randn(4, generator=draws).half(),
            "norm.num_batches_tracked": torch.tensor(number),
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_the_states(count):
    given = states(count)
    bank = stacked(given)
    assert list(bank) == list(given[0])
    for row, state in enumerate(given):
        found = row_of(bank, row)
        assert list(found) == list(state)
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].tolist() == tensor.tolist()


def test_a_bank_is_a_copy_and_its_rows_are_views():
    given = states(2)
    bank = stacked(given)
    given[0]["head.bias"].zero_()
    assert bool(bank["head.bias"][0].any())
    row_of(bank, 1)["head.bias"].fill_(7)
    assert bank["head.bias"][1].tolist() == [7] * 4


def test_states_that_differ_are_no_bank():
    one, other = states(2)
    with pytest.raises(KeyError, match="bias"):
        stacked([one, {name: tensor for name, tensor in other.items() if name != "head.bias"}])
    with pytest.raises(RuntimeError, match="equal size"):
        stacked([one, other | {"head.bias": torch.zeros(5).half()}])


@pytest.mark.parametrize("count", [0, 3])
def test_bytes_are_those_of_all_states_and_their_numbers(count):
    bank = stacked(states(count)) if count else {}
    members = torch.arange(count)
    message = BankBroadcast(client=0, round=0, bank=bank, members=members)
    expected = sum(tensor.numel() * tensor.element_size() for state in states(count) for tensor in state.values())
    assert message.bytes_by_kind().get("weights", 0) == expected
    assert message.num_bytes == expected + 8 * count


# ---------------------------------------------------------------------- the mean loss


def ready(client=1, **options):
    data = Toy()
    data.setup()
    return data, FitData(data.client_data(client).train, 4, **options)


def model(encoder=tiny_encoder, seed=0):
    torch.manual_seed(seed)
    client = FedAvg(encoder((INPUTS,)), CLASSES)
    for buffer in client.buffers():  # running statistics that are not those of the start
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return client


def by_hand(client, inputs, labels):
    """One sample after another, each score with its exponential, in double precision."""
    total = 0.0
    for sample, label in zip(inputs, labels.tolist(), strict=True):
        features = sample.tolist()
        for layer in client.encoder:
            features = apply(layer, features)
        scores = apply(client.head, features)
        total += math.log(sum(math.exp(score) for score in scores)) - scores[label]
    return total / len(labels)


def apply(layer, values):
    """A layer of the small encoders in evaluation mode, number by number."""
    if isinstance(layer, nn.Linear):
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        return [sum(w * v for w, v in zip(row, values, strict=True)) + bias for row, bias in rows]
    if isinstance(layer, nn.BatchNorm1d):
        own = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        columns = zip(values, *(tensor.tolist() for tensor in own), strict=True)
        return [(v - mean) / math.sqrt(var + layer.eps) * w + b for v, mean, var, w, b in columns]
    if isinstance(layer, nn.Tanh):
        return [math.tanh(v) for v in values]
    if isinstance(layer, nn.ReLU):
        return [max(v, 0.0) for v in values]
    assert isinstance(layer, nn.Dropout)
    return values


@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder, dropout_encoder])
@pytest.mark.parametrize("eval_batch_size", [1000, 3])
def test_the_mean_loss_is_that_of_a_loop(encoder, eval_batch_size):
    """In evaluation mode: by running statistics and without dropout, whatever the mode before."""
    data, fit = ready(eval_batch_size=eval_batch_size)
    client = model(encoder).train()
    assert mean_loss(client, fit) == pytest.approx(by_hand(client, *data.tensors(1)), abs=1e-6)


def test_it_leaves_the_model_as_it_was():
    """Modes too, module by module, and no gradient is recorded."""
    _, fit = ready()
    client = model(normed_encoder).train()
    client.encoder[1].eval()
    modes = [module.training for module in client.modules()]
    before = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    drawn = torch.get_rng_state()
    with torch.enable_grad():
        assert isinstance(mean_loss(client, fit), float)
    assert [module.training for module in client.modules()] == modes
    assert any(modes)
    assert not all(modes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in client.state_dict().items())
    assert all(parameter.grad is None for parameter in client.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_samples_are_as_they_are_however_batches_are_made():
    """Neither augmented, nor in two views, nor without the last batch."""
    data, fit = ready(augment=True, views=2, drop_last=True)
    client = model()
    assert mean_loss(client, fit) == pytest.approx(by_hand(client, *data.tensors(1)), abs=1e-6)


def test_features_are_computed_once_for_one_encoder():
    data, fit = ready()
    client, passes = model(), []
    client.encoder.register_forward_hook(lambda *_: passes.append(1))
    first = mean_loss(client, fit)
    with torch.no_grad():
        client.head.bias[0] += 1.0
    second = mean_loss(client, fit)
    assert len(passes) == 1
    assert first != second
    with torch.no_grad():
        client.encoder[0].weight.mul_(2.0)
    third = mean_loss(client, fit)
    assert len(passes) == 2
    assert (second, third) != (first, second)
    assert third == pytest.approx(by_hand(client, *data.tensors(1)), abs=1e-6)


def test_scores_of_half_precision_are_compared_in_single():
    """In half precision the mean would have three digits."""
    data, fit = ready(forward_context=lambda: torch.autocast("cpu", torch.bfloat16))
    client = model()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        scores = client(data.tensors(1)[0])
    assert scores.dtype == torch.bfloat16
    rows = zip(scores.tolist(), data.tensors(1)[1].tolist(), strict=True)
    losses = [math.log(sum(math.exp(score) for score in row)) - row[label] for row, label in rows]
    assert mean_loss(client, fit) == pytest.approx(sum(losses) / len(losses), abs=1e-6)


def test_scores_of_double_precision_stay_so():
    data, fit = ready(convert_input=lambda inputs: inputs.double())
    client = model().double()
    inputs, labels = data.tensors(1)
    assert mean_loss(client, fit) == pytest.approx(by_hand(client, inputs.double(), labels), abs=1e-12)
