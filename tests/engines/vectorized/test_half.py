"""Precision 16-mixed: every client's loss has a scale of its own, as under SequentialEngine's GradScaler."""

from functools import partial

import pytest
import torch
from _helpers.toy import CLIENTS, assert_same, run, whole_state
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.engines.vectorized.optimizer import StackedOptimizer
from pfl_lightning.engines.vectorized.phase import LossScaling
from pfl_lightning.engines.vectorized.stacked_evaluation import _BatchNormInFloat32
from pfl_lightning.methods import FedAvg, FedPAC

# SequentialEngine's optimizers of clients that skip their first steps.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

SHAPES = {"encoder.weight": (4, 4), "encoder.bias": (4,), "head.weight": (3, 4), "head.bias": (3,)}
StepLR = torch.optim.lr_scheduler.StepLR
STEEP = (2, 4)


class Scaled(MixedPrecision):
    """The loss scaling of 16-mixed around passes in single precision, so that results can be compared to rounding."""

    def __init__(self):
        super().__init__("16-mixed", "cpu")

    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)


class Steep(FedAvg):
    """The gradients of some clients overflow on their way back, as long as their scale is large."""

    shared = ()

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("amplitude", torch.ones(()), persistent=False)

    def before_fit(self, context):
        self.amplitude.fill_(1e33 if context.client in STEEP else 1.0)

    def loss_terms(self, features, labels):
        return super().loss_terms((features / self.amplitude) * self.amplitude, labels)


@pytest.fixture
def quick_scaler(monkeypatch):
    """Scales that start where some clients overflow, and grow often, so that they do again."""
    quick = partial(torch.amp.GradScaler, init_scale=2.0**26, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", quick)


def states(method, engine, *plugins, **options):
    """All states under an engine, and what it said."""
    federation = run(method, 1, cohorts=[range(CLIENTS)], engine=engine, plugins=list(plugins), **options)
    return whole_state(federation), getattr(engine, "_warned", set())


HALVED = partial(StepLR, step_size=1, gamma=0.5)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01)
CASES = {
    "plain": (partial(torch.optim.SGD, lr=0.05), None),
    "SGD": (SGD, None),
    "SGD, scheduled": (SGD, HALVED),
    "Adam": (partial(torch.optim.Adam, lr=0.01, amsgrad=True), None),
    "Adam, scheduled": (partial(torch.optim.Adam, lr=0.01), HALVED),
    "foreach": (partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True), None),
    "RAdam": (partial(torch.optim.RAdam, lr=0.01), None),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1), None),
    "Rprop": (partial(torch.optim.Rprop, lr=0.01), None),
}


@pytest.mark.parametrize(("optimizer", "schedule"), CASES.values(), ids=CASES)
def test_clients_that_overflow_skip_their_steps_alone(optimizer, schedule, quick_scaler):
    """Parameters, momenta and numbers of steps of the skipping clients stay as they are, and their schedules go on."""
    method = partial(Steep, epochs=3, optimizer=optimizer, lr_scheduler=schedule)
    got, said = states(method, VectorizedEngine(forward="vmap"), Scaled())
    expected, _ = states(method, SequentialEngine(), Scaled())
    assert not said
    assert_same(got, expected, atol=1e-5)
    unscaled, _ = states(method, SequentialEngine())
    differ = {n.split()[1] for n, t in unscaled.items() if not torch.allclose(t, expected[n], atol=1e-4)}
    assert differ == {str(client) for client in STEEP}  # the clients that skipped, and no other


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_after_the_unscaling(algorithm, quick_scaler):
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    method = partial(Steep, lr=0.05, momentum=0.9)
    got, said = states(method, VectorizedEngine(forward="vmap", **clip), Scaled())
    assert not said
    assert_same(got, states(method, SequentialEngine(**clip), Scaled())[0], atol=1e-5)


def test_half_precision_is_fabric_fits():
    """All at once, the sums are rounded elsewhere."""
    half = MixedPrecision("16-mixed", "cpu")
    method = partial(FedPAC, lr=0.05)
    expected, _ = states(method, SequentialEngine(), half)
    got, said = states(method, VectorizedEngine(forward="vmap"), half)
    assert not said
    assert_same(got, expected, atol=1e-2)
    exact, _ = states(method, SequentialEngine())
    assert any(not torch.allclose(t, exact[n], atol=1e-5) for n, t in expected.items())


def test_an_optimizer_of_some_parameters_sees_their_gradients_alone(quick_scaler):
    """The gradients of the encoder overflow; the optimizer holds the head, which steps."""

    class HeadAlone(Steep):
        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.5)

    got, _ = states(HeadAlone, VectorizedEngine(), Scaled())
    assert_same(got, states(HeadAlone, SequentialEngine(), Scaled())[0], atol=1e-5)
    assert_same(got, states(HeadAlone, SequentialEngine())[0], atol=1e-5)


def test_scales_follow_torchs_scaler():
    """Over a long run of gradients that overflow at random, for clients that leave one by one."""
    generator, rows, settings = torch.Generator().manual_seed(0), 4, {"init_scale": 2.0**120, "growth_interval": 3}
    scaling = LossScaling(torch.amp.GradScaler("cpu", **settings), rows, torch.device("cpu"))
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(rows)]
    optimizers = [torch.optim.SGD([parameter], lr=0.0) for parameter in parameters]
    scalers = [torch.amp.GradScaler("cpu", **settings) for _ in range(rows)]
    for scaler in scalers:
        scaler.scale(torch.ones(()))  # its scale is made when it is first asked
    for step in range(60):
        if step == 40:
            rows = 2
            scaling.narrow(rows)
        gradients = torch.randn(rows, 3, generator=generator) * scaling.scales[:, None]
        bad = torch.rand(rows, generator=generator) < 0.15
        gradients[bad, 1] = (torch.inf, -torch.inf, torch.nan)[step % 3]
        for row in range(rows):
            parameters[row].grad = gradients[row].clone()
            scalers[row].unscale_(optimizers[row])
            scalers[row].step(optimizers[row])
            scalers[row].update()
        skipped = scaling.unscale({"weight": gradients})
        assert skipped == bad.nonzero().flatten().tolist()
        for row in range(rows):
            torch.testing.assert_close(gradients[row], parameters[row].grad, rtol=0, atol=0, equal_nan=True)
            assert scaling.scales[row] == scalers[row].get_scale()
    assert len(set(scaling.scales.tolist())) > 1


@pytest.mark.parametrize(("make", "last"), [(SGD, [3]), (torch.optim.Adam, [2, 1])], ids=["SGD", "Adam"])
def test_clients_are_stepped_together_again_once_they_are_equal(make, last):
    """SGD counts no steps, so that only a momentum that is not there yet keeps clients apart; Adam counts them."""
    encoder = torch.nn.Linear(4, 4)
    encoder.out_features = 4
    optimizer = StackedOptimizer(FedAvg(encoder, 3, optimizer=make), Phase(), [(None, 1)] * 3)
    parameters = {name: torch.zeros(3, *shape) for name, shape in SHAPES.items()}
    gradients = {name: torch.ones_like(tensor) for name, tensor in parameters.items()}
    optimizer.bind(parameters)
    calls = []
    optimizer._optimizer.register_step_post_hook(
        lambda *_: calls.append(len(optimizer._optimizer.param_groups[0]["params"][0]))
    )
    for skipped in ([1], [], []):
        optimizer.step(gradients, skipped)
    assert calls == [2, 2, 1, *last]  # numbers of clients


def test_float16_is_normalized_in_float32():
    """cuDNN refuses batches of float16 of many clients at once, which are then evaluated one by one."""
    layers = [nn.BatchNorm2d(3).eval() for _ in range(4)]
    for layer in layers:
        for tensor in (layer.running_mean, layer.weight, layer.bias):
            nn.init.normal_(tensor)
        nn.init.uniform_(layer.running_var, 0.5, 2.0)
    parameters, buffers = stack_module_state(layers)
    inputs = torch.randn(4, 5, 3, 2, 2).half()
    with _BatchNormInFloat32():
        found = vmap(lambda p, b, x: functional_call(layers[0], (p, b), (x,)))(parameters, buffers, inputs)
    expected = torch.stack([layer(x.float()) for layer, x in zip(layers, inputs, strict=True)])
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)
