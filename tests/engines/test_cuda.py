"""On a real GPU: what a device that pretends cannot show, which is rounding, autocast, its generator and captures.

What need not be on a GPU runs on the CPU, too: so the tests are known to work where there is one.
"""

from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.methods import CORE, EVERY_METHOD
from _helpers.other_device_cases import Module
from _helpers.toy import GivenCohorts, Toy, assert_same, dropout_encoder, for_toy, run, whole_state
from _helpers.toy import quiet_trainer as trainer_for
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import RayEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import Digits, DominantClasses, RandomCrop, RandomFlip
from pfl_lightning.engines.vectorized.step import EagerComputation
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import DualFed, FedAvg, FedPAC

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg"),
    pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU"),
]
ON_GPU = {"accelerator": "gpu", "devices": 1}
ON = [pytest.param({}, id="on_cpu"), pytest.param(ON_GPU, id="on_cuda", marks=needs_gpu)]
COHORTS = [[0, 2, 3], [1, 2, 4]]
ENGINES = {
    "sequential": SequentialEngine,
    "vectorized": partial(VectorizedEngine, forward="vmap"),
    "trainer": TrainerEngine,
}


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one if one[name].numel())


@pytest.fixture
def exact_products(monkeypatch):
    """Without TF32, which convolutions have by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@needs_gpu
@pytest.mark.parametrize("engine", ENGINES)
@EVERY_METHOD
def test_methods_on_cuda_are_as_on_the_cpu(method, engine, exact_products):
    """In double precision where a method multiplies rounding."""
    if engine == "trainer" and method not in CORE:
        pytest.skip("one by one, as under the sequential engine")
    precision, atol = ("64-true", 1e-6) if method is DualFed else ("32-true", 1e-4)
    fit = for_toy(method, lr=0.01, epochs=1)
    here = run(fit, 2, cohorts=COHORTS, engine=ENGINES[engine](), precision=precision)
    there = run(fit, 2, cohorts=COHORTS, engine=ENGINES[engine](), precision=precision, **ON_GPU)
    assert largest_difference(whole_state(there), whole_state(here)) < atol


@needs_gpu
@pytest.mark.parametrize("method", CORE, ids=lambda method: method.__name__)
def test_stacked_steps_on_cuda_never_wait_for_the_host(method, monkeypatch):
    compute = EagerComputation.__call__

    def watched(self, inputs, index):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(self, inputs, index)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(EagerComputation, "__call__", watched)
    engine = VectorizedEngine(forward="vmap")
    run(for_toy(method, lr=0.01, epochs=1), 2, engine=engine, **ON_GPU)
    assert not engine._warned


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("engine", ["vectorized", "trainer"])
@pytest.mark.parametrize("method", [FedAvg, FedPAC], ids=lambda method: method.__name__)
@pytest.mark.parametrize("on", ON)
def test_engines_agree(on, method, engine, precision, exact_products):
    fit = partial(method, lr=0.02, epochs=2)
    expected = run(fit, 2, engine=SequentialEngine(cache_features=False), precision=precision, **on)
    got = run(fit, 2, engine=ENGINES[engine](), precision=precision, **on)
    assert largest_difference(whole_state(got), whole_state(expected)) < (1e-4 if precision == "32-true" else 2e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("on", ON)
def test_workers_of_ray_agree(on, precision, monkeypatch):
    """On the CPU, of an emulated Ray."""
    if on:
        pytest.importorskip("ray")
    engine = RayEngine(workers=1, start_timeout=400.0) if on else fake_ray_engine(monkeypatch, 1)[0]
    fit = partial(FedPAC, lr=0.02, epochs=1)
    expected = run(fit, 2, engine=SequentialEngine(), precision=precision, **on)
    got = run(fit, 2, engine=engine, precision=precision, **on)
    assert largest_difference(whole_state(got), whole_state(expected)) < (1e-6 if precision == "32-true" else 2e-2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on", ON)
def test_a_run_goes_on_as_if_it_had_not_stopped(on, engine, tmp_path):
    """With dropout, whose numbers the device draws."""
    states = []
    for stops in ((3,), (2, 3)):
        for rounds in stops:
            saved = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
            path = tmp_path / "last.ckpt" if len(stops) > 1 and rounds == 3 else None
            federation = run(
                partial(FedPAC, lr=0.02, epochs=1),
                rounds,
                encoder=dropout_encoder,
                engine=ENGINES[engine](),
                loop=GivenCohorts(*COHORTS),
                callbacks=[saved],
                ckpt_path=path and str(path),
                enable_checkpointing=True,
                **on,
            )
        states.append(whole_state(federation))
        (tmp_path / "last.ckpt").unlink()
    assert_same(states[1], states[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on", ON)
def test_augmented_images_are_those_of_the_sequential_engine_on_the_cpu(on, engine, exact_products):
    """The draws are the CPU's, wherever the images are."""
    states = []
    for options, made in (({}, SequentialEngine()), (on, ENGINES[engine]())):
        data = Digits(
            DominantClasses(num_clients=4, samples_per_client=60),
            batch_size=10,
            augment=[RandomCrop(padding=1), RandomFlip()],
        )
        fit = partial(FedPAC, lr=0.02, epochs=1)
        done = run(fit, 2, encoder="small_cnn", data=data, loop=FederatedLoop(), engine=made, **options)
        states.append(whole_state(done))
    assert largest_difference(*states) < 1e-3


@pytest.mark.parametrize("on", ON)
def test_a_project_of_the_users_is_as_on_the_cpu(on, exact_products):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    images = torch.rand(200, 8, 8, generator=generator) + labels[:, None, None] / 10
    loader = DataLoader(TensorDataset(images, labels), batch_size=16)
    losses = []
    for options in ({}, on):
        torch.manual_seed(0)
        loop, module = FederatedLoop(method=FedPAC, num_clients=3, head="head"), Module()
        trainer = trainer_for(2, loop, **options)
        trainer.fit(module, loader, loader)
        trainer.test(module, loader, verbose=False)
        trainer.predict(module, loader)
        losses.append([score.logged["accuracy"] for score in loop.federation.test_scores.values()])
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


class Uploads(FedAvg):
    """Sends a constant to the device in every step, which nothing that is captured can do."""

    def loss_terms(self, features, labels):
        weight = torch.tensor([0.5, 0.5], device=features.device).sum()
        return {"cross_entropy": weight * super().loss_terms(features, labels)["cross_entropy"]}


@needs_gpu
def test_a_capture_that_fails_on_cuda_ends_the_run():
    engine = VectorizedEngine(forward="vmap", cuda_graphs=True)
    fit, data = partial(Uploads, lr=0.02, epochs=4), Toy([[0, 1] * 8] * 3)
    with pytest.raises(ConfigurationError, match=r"could not be captured as a CUDA graph .*: leave cuda_graphs out"):
        run(fit, 2, data=data, loop=FederatedLoop(), engine=engine, **ON_GPU)
