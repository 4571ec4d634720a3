"""Mixed precision: casts of weights, unscaled gradients, scalar parameters, and where received tensors lie."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from _helpers.toy import CLIENTS, Toy, assert_same, quiet_trainer, run, tiny_encoder, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.engines import ProcessEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.engines.lifecycle import begin
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import FitTask
from pfl_lightning.methods import SCAFFOLD, FedAvg, FedPAC, HypCluster, LocalOnly


class _Remembers(MixedPrecision):
    """Keeps casts of weights until the outermost autocast ends, as Lightning's own did before 2.6."""

    def autocast_context_manager(self):
        return torch.autocast(self.device, dtype=torch.bfloat16)


@pytest.mark.parametrize("outer", [True, False], ids=["in a worker", "here"])
def test_clients_are_evaluated_by_their_own_weights(outer):
    federation = run(partial(LocalOnly, lr=0.3, epochs=3), 3)
    environment = replace(federation.environment, precision=_Remembers("bf16-mixed", "cpu"))
    expected = {client: federation.test_scores[client].loss for client in range(CLIENTS)}
    tasks = [(federation.models[0], federation.evaluation_task(client, test=True)) for client in range(CLIENTS)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if outer else nullcontext():
        found = {result.client: result.test.loss for result in SequentialEngine().evaluate(tasks, environment)}
    assert found == pytest.approx(expected, rel=0.05)  # of another client they would be many times as large


class _Half(SequentialEngine):
    """In float16 on the CPU, which the Trainer takes for GPUs alone."""

    def run(self, tasks, environment):
        precision = MixedPrecision("16-mixed", "cpu")
        how = {"forward_context": precision.forward_context, "convert_input": precision.convert_input}

        def in_half():
            for client, task in tasks:
                data = replace(task.context.data, **how)
                yield client, replace(task, context=replace(task.context, data=data))

        return super().run(in_half(), replace(environment, precision=precision))


class _LooksAtGradients(FedAvg):
    norms: ClassVar[list[float]] = []

    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def test_a_hook_before_the_step_sees_gradients_without_the_scale():
    norms = {}
    for name, engine in (("32", SequentialEngine()), ("16", _Half()), ("clipped", _Half(gradient_clip_val=1e6))):
        _LooksAtGradients.norms = norms[name] = []
        run(partial(_LooksAtGradients, lr=0.1, epochs=1), engine=engine)
    assert norms["16"] == pytest.approx(norms["32"], rel=0.02)
    assert norms["clipped"] == pytest.approx(norms["16"])


def test_half_precision_with_loss_scales_runs_one_by_one():
    half, method = {"plugins": [MixedPrecision("16-mixed", "cpu")]}, partial(FedPAC, lr=0.05)
    engine = VectorizedEngine(forward="vmap")
    assert_same(whole_state(run(method, engine=engine, **half)), whole_state(run(method, **half)))
    (line,) = engine._warned
    assert "loss scale, and clients run one by one; use bf16-mixed" in line


class _Overflows(FedAvg):
    """Its loss is too large for float16 at the scale that a scaler begins with."""

    def loss_terms(self, features, labels):
        return {name: 1e4 * term for name, term in super().loss_terms(features, labels).items()}


@pytest.mark.parametrize("schedule", ["rounds", "continue"])
def test_the_loss_scale_goes_on_with_the_client(schedule, tmp_path):
    """Bit for bit as if the clients had one scaler each; and so it does after a resume."""
    half = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    cohorts = [[0, 1], [1, 2], [0, 1]]
    method = partial(_Overflows, lr=1e-6, epochs=2, schedule=schedule)
    whole = run(method, 3, cohorts=cohorts, **half)
    saved = ModelCheckpoint(tmp_path, save_last=True)
    run(method, 2, cohorts=cohorts, callbacks=[saved], enable_checkpointing=True, **half)
    resumed = run(method, 3, cohorts=cohorts, ckpt_path=tmp_path / "last.ckpt", **half)
    assert_same(whole_state(resumed), whole_state(whole))
    scales = [[one.clients.resume_states.get(c) for c in range(CLIENTS)] for one in (whole, resumed)]
    assert scales[0] == scales[1]
    found = [state.partition(b" ") for state in scales[0]]
    assert [fits for fits, *_ in found] == ([b"2", b"3", b"1", b"", b""] if schedule == "continue" else [b""] * CLIENTS)
    once = run(method, 1, cohorts=cohorts, **half).clients.resume_states.get(0).partition(b" ")
    assert once[2] != found[0][2]  # a second scaler would have come to the same from the same, hardly moved model
    assert all(json.loads(state)["scale"] < 65536 for *_, state in found[:3])  # each has stepped back
    assert found[3][2] == found[4][2] == b""


class _Half(TrainerEngine):
    """Its Trainers compute in float16 on the CPU, too."""

    def make_trainer(self, *args, **options):
        trainer = super().make_trainer(*args, **options)
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")
        return trainer


def test_the_loss_scale_of_an_inner_trainer_goes_on_with_the_client():
    method, found = partial(_Overflows, lr=1e-6, epochs=2), []
    for engine in (SequentialEngine(), _Half()):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=3))
        clients = run(method, 2, engine=engine, cohorts=[[0, 1], [1, 2]], plugins=[plugin]).clients
        found.append([clients.resume_states.get(client) for client in range(CLIENTS)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_scale_begins_as_the_trainers_scaler_says():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7))
    federation = run(FedAvg, 1, plugins=[plugin])
    state = json.loads(federation.clients.resume_states.get(0))
    assert state["growth_interval"] == 7
    assert 4.0 <= state["scale"] <= 64.0


def test_what_a_client_keeps_of_a_message_lies_where_its_model_is():
    """A server's tensors may lie elsewhere; "meta" stands for a GPU."""
    federation = Federation(partial(HypCluster, clusters=2), tiny_encoder, seed=1)
    quiet_trainer(1, FederatedLoop()).fit(federation, datamodule=Toy())
    client, task = federation.models[0], federation.evaluation_task(0)
    broadcast = federation.server.broadcast(0, 1)
    federation.to("meta")
    assert {tensor.device.type for *_, tensor in broadcast.tensors()} == {"cpu"}
    received = []
    client.receive = lambda message: received.append(message)
    begin(client, FitTask(task.context, broadcast, {}))
    assert {tensor.device.type for *_, tensor in received[0].tensors()} == {"meta"}


@pytest.mark.parametrize("inner", [SequentialEngine, VectorizedEngine])
def test_a_method_sees_the_clipping_of_the_engine_inside_workers(inner):
    engine = ProcessEngine(workers=1, engine=inner(gradient_clip_val=0.5, gradient_clip_algorithm="value"))
    assert (engine.gradient_clip_val, engine.gradient_clip_algorithm) == (0.5, "value")
    with pytest.raises(ConfigurationError, match='control="steps"'):
        run(partial(SCAFFOLD, control="steps"), engine=ProcessEngine(workers=1, engine=inner(gradient_clip_val=0.5)))
