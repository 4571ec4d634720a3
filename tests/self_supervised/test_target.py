"""Target networks: copies as buffers that follow by a moving average."""

import pytest
import torch
from _helpers.toy import dropout_encoder, normed_encoder, tiny_encoder
from lightly.models.utils import update_momentum
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.self_supervised import BYOL, TargetNetwork


def networks():
    torch.manual_seed(0)
    return normed_encoder((6,)), nn.Linear(4, 3)


def change(*modules):
    with torch.no_grad():
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.add_(1)


def tensors(target):
    return {name: tensor.clone() for name, tensor in target.copies.named_buffers()}


def test_it_follows_as_lightlys_update_does():
    encoder, projector = networks()
    target = TargetNetwork(encoder, projector, momentum=0.97)
    reference = nn.ModuleList(networks())
    change(encoder, projector)
    for _ in range(3):
        target.follow(encoder, projector)
        for online, copy in zip((encoder, projector), reference, strict=True):
            update_momentum(online, copy, 0.97)
    got = tensors(target)
    for name, parameter in reference.named_parameters():
        assert torch.equal(got[name], parameter), name
    for name, buffer in reference.named_buffers():
        assert torch.equal(got[name], buffer), name  # running statistics do not follow


@pytest.mark.parametrize("keep", [False, True])
def test_a_fit_starts_from_a_copy_unless_the_target_is_kept(keep):
    encoder, projector = networks()
    target = TargetNetwork(encoder, projector, momentum=0.5, keep=keep)
    change(encoder, projector)

    def online():
        both = nn.ModuleList([encoder, projector])
        return {**dict(both.named_parameters()), **dict(both.named_buffers())}

    def is_copy():
        return all(torch.equal(tensor, tensors(target)[name]) for name, tensor in online().items())

    assert not is_copy()
    target.start(encoder, projector)
    assert is_copy()
    change(encoder, projector)
    target.follow(encoder, projector)
    before = tensors(target)
    target.start(encoder, projector)
    assert is_copy() is not keep
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(target).items()) is keep
    target.forget()
    target.start(encoder, projector)
    assert is_copy()


@pytest.mark.parametrize("keep", [False, True])
def test_it_is_state_of_the_client_only_where_it_is_kept(keep):
    encoder, projector = networks()
    target = TargetNetwork(encoder, projector, momentum=0.5, keep=keep)
    assert not list(target.parameters())
    names = {name for name, _ in target.named_buffers()}
    assert {"copies.0.0.weight", "copies.0.1.running_mean", "copies.1.bias"} < names
    assert set(target.state_dict()) == (names if keep else set())


def test_it_has_no_gradient_and_does_as_its_originals():
    encoder, projector = networks()
    target = TargetNetwork(encoder, projector, momentum=0.5)
    inputs = torch.randn(5, 6, requires_grad=True)
    output = target(inputs)
    assert not output.requires_grad
    assert torch.equal(output, projector(encoder(inputs)))
    # In training mode it normalizes by the batch, and keeps running statistics of its own.
    assert torch.equal(tensors(target)["0.1.running_mean"], encoder[1].running_mean)


def test_tied_weights_stay_tied():
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, nn.Tanh(), layer)
    target = TargetNetwork(network, momentum=0.5)
    assert target.copies[0][0].weight is target.copies[0][2].weight
    change(layer)
    before = layer.weight.detach() - 1
    target.follow(network)
    torch.testing.assert_close(target.copies[0][2].weight, before + 0.5)  # once, not once a place


def test_the_channels_last_layout_is_kept():
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    copy = TargetNetwork(network, momentum=0.5).copies[0]
    assert copy.weight.is_contiguous(memory_format=torch.channels_last)
    assert not copy.weight.is_contiguous()


def test_recurrent_layers_are_refused():
    encoder = nn.Sequential(nn.LSTM(6, 4))
    encoder.out_features = 4
    with pytest.raises(ConfigurationError, match=r"recurrent layer LSTM.*an objective without a target network"):
        BYOL(encoder)


@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder, dropout_encoder])
def test_the_original_stays_as_it_was(encoder):
    network = encoder((6,))
    names = [name for name, _ in network.named_parameters()]
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    TargetNetwork(network, momentum=0.5).follow(network)
    assert [name for name, _ in network.named_parameters()] == names
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
