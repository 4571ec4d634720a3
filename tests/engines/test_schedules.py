"""Schedules of built-in methods over the rounds, against closed forms and plain loops."""

import math
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put
from _helpers.resume import play
from _helpers.toy import BATCH, SEED, GivenCohorts, Toy, assert_same, quiet_trainer, run, tiny_encoder, whole_state
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from pfl_lightning import Federation, ProcessEngine, SequentialEngine, TrainerEngine, VectorizedEngine, federate
from pfl_lightning.client import FitContext
from pfl_lightning.engines.schedules import advance
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.methods import FedAvg, FedRep

LR, EPOCHS = 0.2, 2
COHORTS = [[0, 2], [1, 2], [0, 1, 2]]
SIZES = [len(own) for own in Toy().labels]


def earlier_rounds(round, client):
    return round


def own_rounds(round, client):
    return sum(client in cohort for cohort in COHORTS[:round])


def none(round, client):
    return 0


COUNTS = {"rounds": earlier_rounds, "continue": own_rounds, "restart": none}


def restate(rate, count, by_step=False):
    """FedAvg whose clients take a step at ``rate(n)``, n being the epochs (or steps) that were counted before it."""
    net, data = first_net(), Toy()
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            local, length = copy_of(net), -(-SIZES[client] // BATCH)
            optimizer = torch.optim.SGD(local.parameters(), lr=LR, momentum=0.5, weight_decay=5e-4)
            for step, (inputs, labels) in enumerate(batches(data, client, round, "fit/0", EPOCHS)):
                before = count(round, client) * EPOCHS
                n = before * length + step if by_step else before + step // length
                optimizer.param_groups[0]["lr"] = rate(n)
                optimizer.zero_grad()
                cross_entropy(local, inputs, labels).backward()
                optimizer.step()
            trained.append(named(local))
        put(net, mean_of(trained, [SIZES[client] for client in cohort]))
    return named(net)


def cosine(n):
    return 0.01 + (LR - 0.01) * (1 + math.cos(math.pi * n / 6)) / 2


def one_cycle(optimizer):
    total = EPOCHS * len(COHORTS)
    return lr_scheduler.OneCycleLR(optimizer, 0.6, total_steps=total, cycle_momentum=False)


def one_cycle_rate(n):
    """Of a plain optimizer, n epochs after its start."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    schedule = one_cycle(optimizer)
    for _ in range(n):
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[0]["lr"]


def warmed_up(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULES = {
    "step": (partial(lr_scheduler.StepLR, step_size=1, gamma=0.1), lambda n: LR * 0.1**n),
    "cosine": (partial(lr_scheduler.CosineAnnealingLR, T_max=6, eta_min=0.01), cosine),
    "one cycle": (one_cycle, one_cycle_rate),
    "warm-up": (
        partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=4),
        lambda n: LR * (0.1 + 0.9 * min(n, 4) / 4),
    ),
    "lambda": (partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (1 + n)), lambda n: LR / (1 + n)),
    "sequential": (warmed_up, lambda n: LR * ((0.1 + 0.45 * n) if n < 2 else 0.5 ** (n - 2))),
}
ENGINES = {
    "sequential": SequentialEngine,
    "trainer": TrainerEngine,
    "vectorized": partial(VectorizedEngine, forward="vmap"),
}


def trained(method, engine=None, **options):
    return named(run(method, len(COHORTS), cohorts=COHORTS, engine=engine, **options).client_model(3))


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_clients_are_at_the_rate_of_the_round(name):
    schedule, rate = SCHEDULES[name]
    got = trained(partial(FedAvg, lr=LR, epochs=EPOCHS, lr_scheduler=schedule))
    assert_same(got, restate(rate, earlier_rounds), atol=1e-6)


@pytest.mark.parametrize("schedule", COUNTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_option_under_each_engine(engine, schedule):
    scheduler, rate = SCHEDULES["lambda"]
    method = partial(FedAvg, lr=LR, epochs=EPOCHS, lr_scheduler=scheduler, schedule=schedule)
    assert_same(trained(method, ENGINES[engine]()), restate(rate, COUNTS[schedule]), atol=1e-5)


class ByStep(FedAvg):
    """A client with a schedule of steps."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.5, weight_decay=5e-4)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda n: 0.95**n)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("schedule", COUNTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_schedule_of_steps_counts_those_of_the_client(engine, schedule):
    expected = restate(lambda n: LR * 0.95**n, COUNTS[schedule], by_step=True)
    got = trained(partial(ByStep, epochs=EPOCHS, schedule=schedule), ENGINES[engine]())
    assert_same(got, expected, atol=1e-5)


def test_counts_reach_worker_processes():
    method = partial(FedAvg, lr=LR, epochs=EPOCHS, schedule="continue", lr_scheduler=SCHEDULES["step"][0])
    assert_same(trained(method, ProcessEngine(workers=1)), trained(method))


# ---------------------------------------------------------------------- rates in use


def watched(rates):
    """SGD that notes the rate of every step."""

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=LR)
        optimizer.register_step_pre_hook(lambda used, *_: rates.append(round(used.param_groups[0]["lr"], 9)))
        return optimizer

    return make


HALVED = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)


def steps_at(*rates):
    """The rates of client 0's steps: three batches an epoch."""
    return [round(rate, 9) for rate in rates for _ in range(3)]


def test_each_phase_counts_its_own_epochs():
    rates = []
    method = partial(FedRep, head_epochs=2, epochs=1, optimizer=watched(rates), lr_scheduler=HALVED)
    run(method, 2, cohorts=[[0]])
    head, encoder = [LR, LR / 2, LR / 4, LR / 8], [LR, LR / 2]
    assert rates == steps_at(*head[:2], encoder[0], *head[2:], encoder[1])


def test_a_fine_tuning_starts_at_the_beginning():
    rates = []
    options = {"fine_tune": "head", "fine_tune_epochs": 2, "optimizer": watched(rates), "lr_scheduler": HALVED}
    run(partial(FedAvg, epochs=1, **options), 3, cohorts=[[0]], data=Toy(Toy().labels[:1]))
    tuned = [LR, LR / 2]
    assert rates == steps_at(LR, *tuned, LR / 2, *tuned, LR / 4, *tuned)


class LeftOut(FedAvg):
    """Client 0 fails in the first round."""

    def make_update(self, context, before):
        if (context.client, context.round) == (0, 0):
            raise ClientError(context.client, context.round, "lost")
        return super().make_update(context, before)


@pytest.mark.parametrize(("schedule", "second"), [("continue", LR), ("rounds", LR / 2)])
def test_a_round_without_the_client_is_no_round_of_its_own(schedule, second):
    rates = []
    method = partial(LeftOut, epochs=1, optimizer=watched(rates), lr_scheduler=HALVED, schedule=schedule)
    with pytest.warns(UserWarning, match="lost"):
        run(method, 2, cohorts=[[0, 1]])
    others = [rate for rate in (LR, LR / 2) for _ in range(5)]  # of client 1, which is there in both rounds
    assert rates == [*steps_at(LR), *others[:5], *steps_at(second), *others[5:]]


def test_a_new_fit_begins_its_schedules():
    rates = []
    method = partial(FedAvg, epochs=1, optimizer=watched(rates), lr_scheduler=HALVED, schedule="continue")
    federation = Federation(method, tiny_encoder, seed=SEED)
    for _ in range(2):
        quiet_trainer(2, GivenCohorts([0])).fit(federation, datamodule=Toy())
    assert rates == steps_at(LR, LR / 2) * 2


@pytest.mark.parametrize("schedule", ["rounds", "continue"])
def test_resume_is_exact(schedule, tmp_path):
    method = partial(FedAvg, lr=LR, epochs=EPOCHS, lr_scheduler=warmed_up, schedule=schedule)
    whole = play(tmp_path / "whole", 5, method)
    play(tmp_path / "cut", 2, method)
    resumed = play(tmp_path / "cut", 5, method, ckpt_path=str(tmp_path / "cut" / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))


def test_a_resumed_run_with_another_schedule_is_told(tmp_path):
    method = partial(FedAvg, epochs=1, lr_scheduler=HALVED)
    play(tmp_path, 1, partial(method, schedule="restart"))
    saved = tmp_path / "last.ckpt"
    with pytest.warns(UserWarning, match="made with schedule 'restart', this run has 'rounds'"):
        play(tmp_path, 2, method, ckpt_path=str(saved))


# ---------------------------------------------------------------------- property


@settings(max_examples=30, deadline=None)
@given(
    earlier=st.integers(0, 12),
    steps=st.integers(1, 4),
    name=st.sampled_from(sorted(set(SCHEDULES) - {"one cycle"})),
)
def test_advanced_schedules_equal_plain_ones(earlier, steps, name):
    """Also in all that comes after, bit by bit."""
    make = SCHEDULES[name][0]
    plain, advanced = (torch.optim.SGD([torch.zeros(1)], lr=LR) for _ in range(2))
    plainly, scheduler = make(plain), make(advanced)
    client, context = FedAvg(tiny_encoder((6,)), 5), FitContext(0, earlier, None, earlier_fits=earlier)
    advance(scheduler, client, client.phase, context, steps)
    for _ in range(earlier * steps):
        plain.step()
        plainly.step()
    for _ in range(5):
        assert advanced.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        for optimizer, schedule in ((plain, plainly), (advanced, scheduler)):
            optimizer.step()
            schedule.step()


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cycle_that_ends_before_the_run_is_refused_at_the_start(engine):
    short = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=EPOCHS)
    method = partial(FedAvg, epochs=EPOCHS, lr_scheduler=short)
    with pytest.raises(ConfigurationError, match=r"round 1\): set total_steps=6, or use schedule='restart'"):
        trained(method, ENGINES[engine]())
    trained(partial(method, schedule="restart"), ENGINES[engine]())


def plateau(optimizer):
    return {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "loss"}


def every_other(optimizer):
    return {"scheduler": HALVED(optimizer), "frequency": 2}


class Scheduled(FedAvg):
    """With Lightning's settings of a schedule."""

    make = staticmethod(plateau)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        return {"optimizer": optimizer, "lr_scheduler": self.make(optimizer)}


class EveryOther(Scheduled):
    make = staticmethod(every_other)


@pytest.mark.parametrize(("method", "reason"), [(Scheduled, "watches a metric"), (EveryOther, "a frequency of 2")])
def test_what_is_no_function_of_the_round_is_refused(method, reason):
    with pytest.raises(ConfigurationError, match=f"{reason}.*schedule='restart'"):
        trained(method, TrainerEngine())


def test_words_are_checked():
    with pytest.raises(ValueError, match="schedule"):
        FedAvg(tiny_encoder((6,)), 5, schedule="round")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(6, 5)

    def training_step(self, batch, batch_idx):
        return self.head(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": FedAvg, "schedule": "rounds"}, "built-in methods.*use 'continue'"),
        ({"method": partial(FedAvg, schedule="restart")}, "schedule: not for a LightningModule.*schedule= of federate"),
    ],
)
def test_a_users_module_has_the_option_of_federate(options, reason):
    loader = torch.utils.data.DataLoader([(torch.zeros(6), 0)] * 8, batch_size=2)
    with pytest.raises(ConfigurationError, match=reason):
        federate(Net(), loader, num_clients=2, **options)
