"""An exception of one client's own code or data costs that client its round, and the others nothing."""

import warnings
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLIENTS, GivenCohorts, Toy, assert_same, run, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import Ditto, FedPer

BAD = 2
ALL, OTHERS = list(range(CLIENTS)), [client for client in range(CLIENTS) if client != BAD]
ENGINES = {
    "sequential": lambda patch: SequentialEngine(),
    "trainer": lambda patch: TrainerEngine(),
    "vectorized": lambda patch: VectorizedEngine(forward="vmap"),
    "workers": lambda patch: fake_ray_engine(patch, 2)[0],
}
each_engine = pytest.mark.parametrize("name", ENGINES)


class OddError(Exception):
    """Does not survive pickling."""

    def __init__(self, number, unit):
        super().__init__(f"{number} {unit}")


def failing(method, place, error, rounds=(1,)):
    """The method, whose client 2 fails in some rounds in one of its functions."""

    class Fails(method):
        def before_fit(self, context):
            if place == "before_fit" and context.client == BAD and context.round in rounds:
                with torch.no_grad():
                    self.head.bias.fill_(7.0)
                raise error()
            return super().before_fit(context)

        def make_update(self, context, before):
            if place == "make_update" and context.client == BAD and context.round in rounds:
                raise error()
            return super().make_update(context, before)

    return partial(Fails, lr=0.05, epochs=1)


def play(method, rounds=3, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run(method, rounds, limit_val_batches=0, **options)
    return federation, [str(w.message) for w in caught if "left out" in str(w.message) or "undone" in str(w.message)]


@pytest.mark.repeated
@each_engine
@pytest.mark.parametrize("place", ["before_fit", "make_update"])
@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_the_others_train_as_if_the_client_had_not_been_drawn(method, place, name, monkeypatch, caplog):
    error = (
        partial(OddError, 3, "m") if place == "make_update" else partial(OSError, 5, "Input/output error", "item.png")
    )
    got, said = play(failing(method, place, error), engine=ENGINES[name](monkeypatch))
    without, _ = play(partial(method, lr=0.05, epochs=1), engine=ENGINES[name](monkeypatch), cohorts=[ALL, OTHERS, ALL])
    assert_same(whole_state(got), whole_state(without), atol=1e-5 if name == "vectorized" else 0.0)
    assert got.clients.rounds_trained.tolist() == [3, 3, 2, 3, 3]
    assert len(said) == 1
    assert f"client 2, round 2: its own code or data failed with {error.func.__name__}: " in said[0]
    lines = [message for message in caplog.messages if "Traceback" in message]
    assert len(lines) == 1
    assert lines[0].startswith("client 2, round 2:\n")
    assert f", in {place}\n" in lines[0]


@each_engine
@pytest.mark.parametrize(("rounds", "option"), [((0,), "skip"), ((1,), "raise")])
def test_it_ends_the_run_before_a_good_round_or_where_that_is_asked_for(rounds, option, name, monkeypatch):
    loop, method = (
        GivenCohorts(ALL, on_client_error=option),
        failing(FedPer, "before_fit", partial(KeyError, "no column"), rounds),
    )
    with pytest.raises(KeyError, match="no column") as caught:
        play(method, engine=ENGINES[name](monkeypatch), loop=loop)
    assert f"in the local fit of client 2, round {rounds[0] + 1}" in caught.value.__notes__


@pytest.mark.parametrize("error", [partial(ConfigurationError, "misuse"), KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["sequential", "trainer", "vectorized"])
def test_misuse_and_interrupts_end_the_run_in_any_round(error, name, monkeypatch):
    with pytest.raises((ConfigurationError, SystemExit, KeyboardInterrupt)):
        play(failing(FedPer, "before_fit", error), engine=ENGINES[name](monkeypatch))


def test_a_false_assertion_of_the_package_ends_the_run_and_one_of_the_user_does_not(monkeypatch):
    _, said = play(failing(FedPer, "before_fit", partial(AssertionError, "a user's")), engine=SequentialEngine())
    assert len(said) == 1

    def broken(client, context, *rest):
        if context.client == BAD and context.round == 1:
            exec(compile("assert False", str(lifecycle.__file__), "exec"))
        return conclude(client, context, *rest)

    from pfl_lightning.engines import base, lifecycle

    conclude = base.conclude
    monkeypatch.setattr(base, "conclude", broken)
    with pytest.raises(AssertionError):
        play(partial(FedPer, lr=0.05, epochs=1), engine=SequentialEngine())


class Messy(Net):
    """Changes what it can reach in its eighth fit, that of client 2 in the second round, and then fails."""

    fits = 0

    def __init__(self, fails):
        super().__init__(norm=True)
        self.register_buffer("seen", torch.zeros(()))
        self.scale, self.fails = 1.0, fails

    def on_train_start(self):
        type(self).fits += 1

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = self.scale * super().training_step(batch, batch_idx)
        if self.fails and self.fits == 8 and batch_idx == 1:
            self.scale = 100.0
            self.body[0].register_forward_hook(lambda module, inputs, output: output * 9)
            self.body.eval()
            self.fc.requires_grad_(False)
            torch.set_grad_enabled(False)
            raise FileNotFoundError("shard 3 is gone")
        return loss


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_what_a_failing_module_has_changed_is_not_the_next_client_s(engine):
    def fit(fails, *cohorts, rounds=3, **trainer):
        Messy.fits = 0
        torch.manual_seed(1)
        found, _ = run_project(
            FedPer,
            rounds,
            module=Messy(fails),
            engine=engine(),
            cohorts=cohorts,
            head="fc",
            data=data(),
            trainer=trainer,
        )
        return found

    def data():
        return Data(
            Toy(batch_size=5, labels=[[0, 1] * 5, [1, 2] * 5, [0, 2] * 5, [3, 4] * 5, [0, 4] * 5]), batch_size=5
        )

    before = torch.is_grad_enabled()
    with pytest.warns(
        UserWarning, match="client 2, round 2: its own code or data failed with FileNotFoundError: shard 3"
    ):
        got = fit(True, ALL, ALL, ALL)
    assert torch.is_grad_enabled() == before
    assert_same(whole_state(got), whole_state(fit(False, ALL, OTHERS, ALL)))
    assert not any(layer._forward_hooks for layer in got.clients.models[0].modules())


def test_a_round_with_too_few_updates_is_undone_and_three_in_a_row_end_the_run():
    error = partial(RuntimeError, "no memory")
    loop = GivenCohorts(ALL, [BAD], [BAD], ALL)
    got, said = play(failing(FedPer, "before_fit", error, rounds=(1, 2)), 4, loop=loop)
    without, _ = play(partial(FedPer, lr=0.05, epochs=1), 1)
    assert next(text for text in said if "undone" in text).startswith(
        "round 2 is undone: 0 of 1 updates can be aggregated"
    )
    assert got.clients.rounds_trained.tolist() == [2] * CLIENTS
    assert loop.rounds == 4
    assert loop.undone == 0
    halted, _ = play(failing(FedPer, "before_fit", error, rounds=(1, 2)), 3, loop=GivenCohorts(ALL, [BAD], [BAD], ALL))
    assert_same(whole_state(halted), whole_state(without))
    with pytest.raises(FederationError, match="round 4: 3 rounds in a row had to be undone; the last: 0 of 1 updates"):
        play(failing(FedPer, "before_fit", error, rounds=(1, 2, 3)), 5, loop=GivenCohorts(ALL, [BAD], [BAD], [BAD]))


def test_a_resume_is_as_if_nothing_had_stopped(tmp_path):
    method = failing(Ditto, "make_update", partial(ValueError, "odd"), rounds=(1, 3))
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, _ = play(method, 5, callbacks=[keep], enable_checkpointing=True)
    resumed, said = play(method, 5, ckpt_path=str(tmp_path / "epoch=2.ckpt"))
    assert len(said) == 1
    assert_same(whole_state(resumed), whole_state(whole))
    assert resumed.clients.rounds_trained.tolist() == whole.clients.rounds_trained.tolist()


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="on_client_error"):
        FederatedLoop(on_client_error="ignore")
