"""A local fit that ends after so many steps, under every engine, against a plain loop of as many."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from _helpers.counting import Counting, Data
from _helpers.engines import trained
from _helpers.toy import BATCH, LABELS, Toy, quiet_trainer
from torch.nn import functional as F

from pfl_lightning import ProcessEngine, SequentialEngine, TrainerEngine, VectorizedEngine, federate
from pfl_lightning.datamodules import IID
from pfl_lightning.engines import FitTask
from pfl_lightning.engines.lifecycle import make_context
from pfl_lightning.methods import FedAvg, FedPAC, FedRep
from pfl_lightning.seeding import Purpose, seeded_generator

ENGINES = {
    "sequential": SequentialEngine,
    "vectorized": partial(VectorizedEngine, forward="vmap"),
    "trainer": TrainerEngine,
    "processes": partial(ProcessEngine, 1),
}
PHASES = {FedAvg: {"epochs": 2}, FedRep: {"head_epochs": 1, "epochs": 2}, FedPAC: {"head_epochs": 1, "epochs": 1}}


def fits(federation, engine, limits):
    """The results of limited fits of some clients, from what the server has now."""

    def tasks():
        for client, limit in limits.items():
            (model, state), data = federation.clients.model_and_state(client), federation.data
            context = make_context(data, client, 1, model, federation.environment, training=True)
            broadcast = federation.server.broadcast(client, 1)
            yield model, FitTask(replace(context, max_steps=limit), broadcast, state)

    engine.start(federation.clients.models, federation.data, federation.environment)
    try:
        return [result.with_own_state() for result in engine.run(tasks(), federation.environment)]
    finally:
        engine.stop()


def steps_of(method, client):
    """Batches of a whole local fit."""
    batches = -(-len(LABELS[client]) // BATCH)
    return batches * sum(PHASES[method].values())


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("method", PHASES)
def test_every_engine_ends_after_so_many_steps(method, name):
    federation = trained(partial(method, lr=0.1, **PHASES[method]), precision="64-true")
    for limits in ({0: 1, 1: 4, 2: 7}, {0: 3, 1: 100, 2: math.inf, 3: steps_of(method, 3)}):
        expected = fits(federation, SequentialEngine(), limits)
        for got, wanted in zip(fits(federation, ENGINES[name](), limits), expected, strict=True):
            limit, whole = limits[got.client], steps_of(method, got.client)
            assert (got.num_steps, got.is_cut) == (min(limit, whole), limit < whole)
            for state, other in ((got.update.weights, wanted.update.weights), (got.personal, wanted.personal)):
                torch.testing.assert_close(dict(state), dict(other), rtol=0, atol=1e-9)


def test_a_limited_fit_is_as_many_steps_of_a_plain_loop():
    federation = trained(partial(FedAvg, lr=0.1, epochs=2, momentum=0.0, weight_decay=0.0))
    [result] = fits(federation, SequentialEngine(), {1: 7})  # of five batches in an epoch
    model = federation.clients.model_of(1)
    model.load_state_dict(dict(federation.server.broadcast(1, 1).weights), strict=False)
    generator = seeded_generator(federation.seed, f"{Purpose.FIT}/0", 1, 1)
    inputs, labels = Toy().tensors(1)
    batches = [b for _ in range(2) for b in torch.randperm(len(inputs), generator=generator).split(BATCH)]
    for batch in batches[:7]:
        model.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(dict(result.update.weights), dict(model.state_dict()), rtol=0, atol=1e-6)


def test_a_users_module_is_cut_and_goes_on(tmp_path):
    module, data = federate(Counting(), Data(), FedAvg, IID(2), epochs=2)  # 12 items, 3 batches in an epoch
    quiet_trainer(1).fit(module, datamodule=data)

    def fit(limit):
        model = module.clients.model_of(0)
        context = replace(make_context(module.data, 0, 1, model, module.environment, training=True), max_steps=limit)
        stored = module.clients.model_and_state(0)[1], module.clients.resume_states.get(0)
        task = FitTask(context, module.server.broadcast(0, 1), *stored)
        return next(module.engine.run([(model, task)], module.environment))

    found = {limit: fit(limit) for limit in (2, 3, 4, 6, 9)}
    assert {limit: (one.num_steps, one.is_cut) for limit, one in found.items()} == {
        **{2: (2, True), 3: (3, True), 4: (4, True)},
        **{6: (6, False), 9: (6, False)},
    }
