"""Networks at given parameters and inner gradient steps against modules that hold those parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from pfl_lightning.functional import descend, hessian_product, loss_and_gradients, output_at, scores_at


class Net(nn.Module):
    def __init__(self, seed=0, batch_norm=True):
        super().__init__()
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(4) if batch_norm else nn.Identity()
        self.encoder = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh())
        self.head = nn.Linear(4, 5)
        self.double()

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def batch(samples=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (samples,), generator=generator)


def buffers(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def assert_close(got, expected, **options):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, **options)


def test_a_network_at_the_parameters_of_another_is_the_other():
    net, other = Net(), Net(seed=1)
    inputs, _ = batch()
    got = scores_at(net, dict(other.named_parameters()), inputs)
    torch.testing.assert_close(got, other(inputs), rtol=0, atol=0)
    got = output_at(net.head, {"bias": other.head.bias}, inputs[:, :1].expand(-1, 4))  # the weight is its own
    torch.testing.assert_close(got, F.linear(inputs[:, :1].expand(-1, 4), net.head.weight, other.head.bias))


def test_statistics_move_in_the_pass_that_takes_the_networks_own():
    net, (inputs, _) = Net(), batch()
    first, plain = buffers(net), copy.deepcopy(net)
    params = {name: p.detach() for name, p in net.named_parameters()}
    scores_at(net, params, inputs)
    assert_close(buffers(net), first, rtol=0, atol=0)
    scores_at(net, params, inputs, own_buffers=True)
    plain(inputs)
    assert_close(buffers(net), buffers(plain), rtol=0, atol=0)
    assert not torch.equal(net.encoder[1].running_mean, first["encoder.1.running_mean"])


def test_given_buffers_take_the_place_of_the_networks_own():
    net, other, (inputs, _) = Net().eval(), Net(), batch()
    other(inputs)
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    torch.testing.assert_close(scores_at(net, state, inputs), other.eval()(inputs))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_equal_those_of_sgd(weight_decay):
    net, (inputs, labels) = Net(), batch()
    first, plain = buffers(net), copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, weight_decay=weight_decay)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), labels).backward()
        optimizer.step()

    def objective(at):
        return F.cross_entropy(scores_at(net, at, inputs), labels)

    got = descend(objective, dict(net.named_parameters()), steps=3, lr=0.2, weight_decay=weight_decay)
    assert_close(got, {name: p.detach() for name, p in plain.named_parameters()})
    assert not any(tensor.requires_grad for tensor in got.values())
    assert_close(buffers(net), first, rtol=0, atol=0)  # batch normalization inside torch.func.grad ran on copies


def test_loss_and_gradients_equal_autograd_and_are_detached():
    net, (inputs, labels) = Net(), batch()
    loss = F.cross_entropy(copy.deepcopy(net)(inputs), labels)
    params = dict(net.named_parameters())
    value, gradients = loss_and_gradients(lambda at: F.cross_entropy(scores_at(net, at, inputs), labels), params)
    expected = torch.autograd.grad(F.cross_entropy(net(inputs), labels), list(params.values()))
    torch.testing.assert_close(value, loss.detach())
    assert_close(gradients, dict(zip(params, expected, strict=True)))
    assert not any(tensor.requires_grad for tensor in (value, *gradients.values()))


def test_the_product_with_the_hessian_of_a_quadratic():
    """f(x) = 1/2 x'Ax: the product is A v, wherever it is taken."""
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    matrix, vector = root @ root.T, torch.arange(4, dtype=torch.float64)
    start = torch.ones(4, dtype=torch.float64, requires_grad=True)
    got = hessian_product(lambda at: at["x"] @ matrix @ at["x"] / 2, {"x": start}, {"x": vector})
    torch.testing.assert_close(got["x"], matrix @ vector)
    assert not got["x"].requires_grad


def test_the_product_with_the_hessian_of_a_network_with_batch_normalization():
    net, (inputs, labels) = Net(), batch()
    first, params = buffers(net), dict(net.named_parameters())
    vector = {name: torch.randn_like(p) for name, p in params.items()}
    gradients = torch.autograd.grad(F.cross_entropy(net(inputs), labels), list(params.values()), create_graph=True)
    slope = sum((g * vector[name]).sum() for name, g in zip(params, gradients, strict=True))
    expected = torch.autograd.grad(slope, list(params.values()))
    net.load_state_dict(first, strict=False)
    got = hessian_product(lambda at: F.cross_entropy(scores_at(net, at, inputs), labels), params, vector)
    assert_close(got, dict(zip(params, expected, strict=True)))
    assert_close(buffers(net), first, rtol=0, atol=0)


class Step(nn.Module):
    """A loss with inner steps and a product with the Hessian."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs, labels):
        def objective(at):
            return F.cross_entropy(scores_at(self.net, at, inputs), labels)

        own = dict(self.net.named_parameters())
        reached = descend(objective, own, steps=2, lr=0.3)
        curved = hessian_product(objective, own, reached)
        held = sum((p - reached[name]).square().sum() + (p * curved[name]).sum() for name, p in own.items())
        return F.cross_entropy(scores_at(self.net, own, inputs, own_buffers=True), labels) + held


def test_a_step_with_inner_steps_is_vectorized_over_clients():
    """Under vmap with ordinary autograd around it, as the vectorizing engine does it, and one client after another."""
    step, clients = Step(), 3
    stacked = {
        name: torch.stack([(1 + 0.1 * client) * tensor.detach() for client in range(clients)])
        for name, tensor in step.state_dict().items()
        if tensor.is_floating_point()
    }
    parts = [batch(seed=client) for client in range(clients)]
    inputs, labels = (torch.stack(part) for part in zip(*parts, strict=True))
    trained = {name: t.clone().requires_grad_() for name, t in stacked.items() if "running" not in name}
    moved = {name: t.clone() for name, t in stacked.items() if "running" in name}
    moved["net.encoder.1.num_batches_tracked"] = torch.zeros(clients, dtype=torch.int64)

    def one(trained, moved, inputs, labels):
        return functional_call(step, {**trained, **moved}, (inputs, labels))

    vmap(one)(trained, moved, inputs, labels).sum().backward()
    for client in range(clients):
        alone = Step()
        alone.load_state_dict({name: t[client] for name, t in stacked.items()}, strict=False)
        alone(*parts[client]).backward()
        assert_close(
            {name: t.grad[client] for name, t in trained.items()},
            {name: p.grad for name, p in alone.named_parameters()},
        )
        assert_close(
            {name: t[client] for name, t in moved.items()}, {f"net.{n}": b for n, b in alone.net.named_buffers()}
        )


@pytest.mark.parametrize("inference", [False, True])
def test_gradients_are_those_of_torch_func(inference):
    """Bit by bit, in and out of inference mode, with zeros for what the objective does not use."""
    net, (inputs, labels) = Net(), batch()
    params = {**dict(net.named_parameters()), "unused": torch.ones(2)}

    def objective(at):
        own = {name: tensor for name, tensor in at.items() if name != "unused"}
        return F.cross_entropy(scores_at(net, own, inputs), labels)

    gradients, value = torch.func.grad_and_value(objective)(params)
    with torch.inference_mode(inference):
        got_value, got = loss_and_gradients(objective, params)
    assert torch.equal(got_value, value)
    assert not got_value.requires_grad
    assert_close(got, {name: gradient.detach() for name, gradient in gradients.items()}, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("names", [(), ("weight",)])
def test_an_objective_of_other_things_has_gradients_of_zero(names):
    params = {name: torch.ones(2, requires_grad=True) for name in names}
    value, gradients = loss_and_gradients(lambda at: torch.tensor(3.0), params)
    assert value == 3
    assert gradients.keys() == params.keys()
    assert all(torch.equal(gradient, torch.zeros(2)) for gradient in gradients.values())
