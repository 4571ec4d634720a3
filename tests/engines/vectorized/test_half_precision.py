"""What autocast computes in single precision on a GPU, it does under `vmap`, too: seen on fake tensors of one."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from _helpers.methods import EVERY_METHOD
from _helpers.toy import Toy, for_toy, run, tiny_encoder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pfl_lightning.engines.lifecycle import enter_phase, phase_data
from pfl_lightning.engines.vectorized.precision import SinglePrecision
from pfl_lightning.engines.vectorized.step import EagerComputation
from pfl_lightning.fit.context import FitContext
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.methods import PerFedAvg, PFedMe
from pfl_lightning.methods._self_supervised import SelfSupervisedClient

HALF = [torch.float16, torch.bfloat16]
DEVICE = torch.device("cuda")
WATCHED = ("_softmax", "_log_softmax", "native_group_norm", "native_layer_norm", "_cdist_forward", "exp", "log", "pow")
WATCHED += ("linalg_vector_norm", "binary_cross_entropy_with_logits", "logsumexp", "mse_loss", "sigmoid", "rsqrt")


@contextmanager
def autocast(dtype):
    """What ``torch.autocast("cuda")`` does where there is a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_cache_enabled(True)


FUNCTIONS = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax of a tensor": lambda x: x.softmax(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "affine group_norm": lambda x: F.group_norm(x, 2, torch.ones(4, device=x.device), torch.zeros(4, device=x.device)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "cdist": lambda x: torch.cdist(x, x),
    "norm": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "l1": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "pow": lambda x: x.pow(2),
    "exp": torch.exp,
    "log": torch.log,
    "sum": torch.sum,
    "cumsum": lambda x: x.cumsum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "linear": lambda x: F.linear(x.float(), x.float()),
    "matmul": lambda x: x.float() @ x.float().T,
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_have_the_precision_that_they_have_alone(function, dtype):
    with FakeTensorMode(), autocast(dtype):
        stacked = torch.randn(3, 8, 4, device=DEVICE, dtype=dtype)
        alone = function(stacked[0])
        with SinglePrecision("cuda"):
            together = vmap(function)(stacked)
    assert together.dtype == alone.dtype
    assert together.shape == (3, *alone.shape)


def test_nothing_is_cast_without_autocast():
    with SinglePrecision("cuda"):
        assert F.softmax(torch.randn(2, 3, dtype=torch.bfloat16), -1).dtype == torch.bfloat16


class Dtypes(TorchDispatchMode):
    """Types of what sensitive operations take."""

    def __init__(self):
        super().__init__()
        self.found = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in WATCHED and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self.found[name].add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def normed(input_shape):
    encoder = nn.Sequential(tiny_encoder(input_shape), nn.GroupNorm(2, 4))
    encoder.out_features = 4
    return encoder


class Halves:
    @staticmethod
    def forward_context():
        return autocast(torch.float16)


def computed(client, environment, parts, apart):
    """The types of the terms of a step on fake tensors, and those of sensitive operations."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Dtypes() as dtypes:
        trained, others, batch = torch.utils._pytree.tree_map(
            lambda t: mode.from_tensor(t.detach()).to(DEVICE).expand(3, *t.shape).clone(), parts
        )
        step = EagerComputation(client, environment)._one  # without the backward pass, which needs a stream
        if apart:
            terms, _ = step(*torch.utils._pytree.tree_map(lambda t: t[0], (trained, others, batch)), 0)
        else:
            terms, _ = vmap(step, in_dims=(0, 0, 0, None), randomness="different")(trained, others, batch, 0)
    return {name: term.dtype for name, term in terms.items()}, dict(dtypes.found)


@EVERY_METHOD
def test_losses_of_every_method_have_the_precision_that_they_have_alone(method):
    if issubclass(method, SelfSupervisedClient):
        pytest.skip("lightly's losses select by masks, which fake tensors cannot; they are called in single precision")
    federation = run(for_toy(method, lr=0.01, epochs=1), 1, encoder=normed)
    data = Toy()
    data.setup()
    client = federation.models[0]
    environment = replace(FitEnvironment(device=DEVICE), precision=Halves())
    own = FitData(data.client_data(1).train, 4, views=client.views)
    for phase in client.phases():
        if phase.source != "own":
            continue
        enter_phase(client, phase)
        batch = next(iter(phase_data(client, phase, FitContext(1, 0, own)).loader(torch.Generator())))
        named = (*client.named_parameters(), *client.named_buffers())
        trained = {name: tensor for name, tensor in named if tensor.requires_grad}
        others = {name: tensor for name, tensor in named if not tensor.requires_grad}
        if method in (PFedMe, PerFedAvg):
            pytest.skip("it takes gradients in its step, for which fake tensors of a GPU have no stream")
        alone, together = (computed(client, environment, (trained, others, tuple(batch)), one) for one in (True, False))
        assert together[0] == alone[0]
        for name in alone[1].keys() & together[1].keys():
            assert together[1][name] <= alone[1][name] | {torch.float32}, name
