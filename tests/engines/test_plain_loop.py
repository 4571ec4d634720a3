"""Clipping, schedulers, optimizers, precision and phases against plain loops."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from _helpers.plain import batches, cross_entropy, first_net, named
from _helpers.toy import BATCH, SEED, Toy, assert_same, run
from torch.optim import lr_scheduler

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.methods import FedAvg, FedPAC, FedRep

ENGINES = [SequentialEngine, TrainerEngine]
LR, EPOCHS, CLIENT = 0.5, 3, 1


def plain_loop(make_optimizer, *, clip=None, schedule=None, every_step=False, forward=nullcontext, dtype=torch.float32):
    """Train client 1's model in the ordinary way."""
    net, data = first_net().to(dtype), Toy()
    optimizer = make_optimizer(net.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    steps_per_epoch = -(-len(data.labels[CLIENT]) // BATCH)
    for step, (inputs, labels) in enumerate(batches(data, CLIENT, 0, "fit/0", EPOCHS)):
        optimizer.zero_grad()
        with forward():
            loss = cross_entropy(net, inputs.to(dtype), labels)
        loss.backward()
        if clip is not None:
            clip(net.parameters())
        optimizer.step()
        if scheduler is not None and (every_step or (step + 1) % steps_per_epoch == 0):
            scheduler.step()
    return named(net)


def trained(method, engine, **options):
    """The same by the package: a cohort of one."""
    federation = run(partial(method, epochs=EPOCHS), cohorts=[[CLIENT]], engine=engine, **options)
    return named(federation.client_model(CLIENT))


SGD = partial(torch.optim.SGD, lr=LR, momentum=0.5, weight_decay=5e-4)


def assert_differs(state, other):
    assert not torch.allclose(state["head.weight"], other["head.weight"], atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ("norm", partial(torch.nn.utils.clip_grad_norm_, max_norm=0.2)),
        ("value", partial(torch.nn.utils.clip_grad_value_, clip_value=0.2)),
    ],
)
def test_clipping(engine, algorithm, clip):
    got = trained(partial(FedAvg, lr=LR), engine(gradient_clip_val=0.2, gradient_clip_algorithm=algorithm))
    assert_same(got, plain_loop(SGD, clip=clip), atol=1e-6)
    assert_differs(got, plain_loop(SGD))


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.0}, {"gradient_clip_algorithm": "l1"}])
@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_without_meaning_is_refused(engine, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        engine(**options)


SCHEDULE = partial(lr_scheduler.ExponentialLR, gamma=0.6)


@pytest.mark.parametrize("engine", ENGINES)
def test_scheduler_by_epoch(engine):
    got = trained(partial(FedAvg, lr=LR, lr_scheduler=SCHEDULE), engine())
    assert_same(got, plain_loop(SGD, schedule=SCHEDULE), atol=1e-6)
    assert_differs(got, plain_loop(SGD))


class _StepScheduled(FedAvg):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters())
        return [optimizer], [{"scheduler": SCHEDULE(optimizer), "interval": "step"}]


@pytest.mark.parametrize("engine", ENGINES)
def test_scheduler_by_step(engine):
    got = trained(_StepScheduled, engine())
    assert_same(got, plain_loop(SGD, schedule=SCHEDULE, every_step=True), atol=1e-6)
    assert_differs(got, plain_loop(SGD, schedule=SCHEDULE))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "make", [partial(torch.optim.Adam, lr=0.02), partial(torch.optim.AdamW, lr=0.02, betas=(0.5, 0.9))]
)
def test_optimizer_of_ones_own(engine, make):
    got = trained(partial(FedAvg, optimizer=make), engine())
    assert_same(got, plain_loop(make), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_mixed(engine):
    """The weights of every step are those that the step before left: no cast of them may be older."""
    got = trained(partial(FedAvg, lr=LR), engine(), precision="bf16-mixed")
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    assert_same(got, plain_loop(SGD, forward=autocast), atol=1e-6)
    assert_differs(got, named(first_net()))


@pytest.mark.parametrize("engine", ENGINES)
def test_double_precision(engine):
    got = trained(partial(FedAvg, lr=LR), engine(), precision="64-true")
    assert_same(got, plain_loop(SGD, dtype=torch.float64), atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_mixed_reaches_training_step_and_evaluation_alone(engine):
    seen = []

    class Watched(FedAvg):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            with torch.no_grad():
                seen.append(("step", self.head(self.encoder(batch[0])).dtype))
            return output

        def forward(self, inputs):
            scores = super().forward(inputs)
            seen.append(("evaluation", scores.dtype))
            return scores

        def make_update(self, context, before):
            seen.append(("outside", (torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
            return super().make_update(context, before)

    run(partial(Watched, epochs=1), engine=engine(), precision="bf16-mixed")
    expected = {("step", torch.bfloat16), ("evaluation", torch.bfloat16), ("outside", torch.float32)}
    assert set(seen) == expected


def test_bf16_mixed_fine_tuning_is_evaluated_with_the_tuned_weights():
    def go(**tuning):
        federation = run(partial(FedAvg, lr=LR, epochs=1, **tuning), precision="bf16-mixed")
        return {client: score.loss for client, score in federation.validation_scores.items()}

    tuned, plain = go(fine_tune="all", fine_tune_epochs=10), go()
    assert sum(tuned.values()) < 0.7 * sum(plain.values())


def test_phases_train_what_they_name_and_freeze_the_rest():
    found = []

    class Watched(FedRep):
        def on_train_start(self):
            self.at_start = named(self)

        def on_train_end(self):
            now = named(self)
            moved = {name.split(".")[0] for name in now if not torch.equal(now[name], self.at_start[name])}
            found.append(
                (self.phase.name, moved, {n.split(".")[0] for n, p in self.named_parameters() if p.requires_grad})
            )

    for engine in (TrainerEngine(), SequentialEngine(cache_features=False)):
        found.clear()
        run(partial(Watched, head_epochs=2), cohorts=[[0]], engine=engine, seed=SEED)
        assert found == [("head", {"head"}, {"head"}), ("encoder", {"encoder"}, {"encoder"})]


def test_statistics_of_fedpac_under_bf16_are_single_precision():
    federation = run(partial(FedPAC, epochs=1), 2, precision="bf16-mixed")
    assert federation.server.centroids.dtype == torch.float32
    assert bool(federation.server.centroids.isfinite().all())
