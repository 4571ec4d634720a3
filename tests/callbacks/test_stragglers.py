"""Clients that are slow, late or gone: the simulated clock, who is left out, and what a checkpoint keeps of it."""

import json
import math
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.resume import play
from _helpers.toy import (
    BATCH,
    CLIENTS,
    LABELS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    quiet_trainer,
    run,
    tiny_encoder,
    whole_state,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.nn import functional as F

from pfl_lightning import Federation, ProcessEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import Devices, FederatedLoop, Stragglers
from pfl_lightning.devices import Fleet
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.loop import draw_clients
from pfl_lightning.methods import FedAvg, FedPer, FedProto, LocalOnly
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.seeding import Purpose, seeded_generator
from pfl_lightning.simulation import Simulation

FIT = partial(FedAvg, lr=0.1, epochs=2, momentum=0.0, weight_decay=0.0)
SPEEDS = [1, 2, 3]  # seconds a step of three clients, which take 6, 10 and 8 steps
STEPS = [6, 10, 8]


def trace(path, **columns):
    """A file with a row for each client."""
    rows = zip(range(len(next(iter(columns.values())))), *columns.values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [["client", *columns], *rows]) + "\n")
    return str(path)


@pytest.fixture
def three(tmp_path):
    """Runs three clients of known speeds, half a second of messages, for some rounds; gives federation and callback."""
    devices = Devices(trace(tmp_path / "speeds.csv", seconds_per_step=SPEEDS), transfer_seconds=0.5)

    def play_three(rounds=1, fit=FIT, cohorts=([0, 1, 2],), loop=None, callbacks=(), engine=None, **options):
        own, loop = Stragglers(devices, **options), loop or GivenCohorts(*cohorts)
        settings = {"data": Toy(LABELS[:3]), "loop": loop, "precision": "64-true", "engine": engine}
        return run(fit, rounds, callbacks=[own, *callbacks], **settings), own

    return play_three


# ---------------------------------------------------------------------- the clock, in closed form


@pytest.mark.parametrize(
    ("options", "seconds", "trained"),
    [
        ({}, 3 * 8 + 0.5, [1, 1, 1]),  # the slowest one
        ({"deadline": 30}, 3 * 8 + 0.5, [1, 1, 1]),
        ({"deadline": 24.5}, 3 * 8 + 0.5, [1, 1, 1]),
        ({"deadline": 24.4}, 24.4, [1, 1, 0]),  # one is missing until the end
        ({"deadline": 12.5, "late": "partial"}, 12.5, [1, 1, 1]),  # 6 steps of 2 s, 4 steps of 3 s
        ({"deadline": 3, "late": "partial"}, 3, [1, 1, 0]),  # 2 steps, 1 step, none
    ],
)
def test_a_round_takes_as_long_as_its_last_client_or_until_the_deadline(three, options, seconds, trained):
    federation, own = three(**options)
    assert own.simulation.clock == seconds
    assert federation.rounds_trained == trained
    assert float(federation.trainer.callback_metrics["simulated/seconds"]) == pytest.approx(seconds)
    assert int(federation.trainer.callback_metrics["train/clients_left_out"]) == trained.count(0)


def test_over_selection_takes_the_first_updates(three):
    federation, own = three(2, loop=FederatedLoop(2), over_selection=1.5)
    assert own.simulation.clock == 2 * (2 * 10 + 0.5)
    assert federation.rounds_trained == [2, 2, 0]


def test_a_late_update_comes_in_the_round_in_which_it_arrives(three):
    """The third client's comes after 24.5 s, in the round that lasts from 20.5 s on."""
    federation, own = three(2, deadline=20.5, late="next")
    assert own.simulation.clock == 20.5 + 20.5  # the second round waits for clients 0 and 1 alone: the third is busy
    assert federation.rounds_trained == [2, 2, 1]
    assert own.simulation.pending == []


# ---------------------------------------------------------------------- against slow obvious versions


def plain_fit(model, weights, client, round, steps):
    """So many steps of SGD on a client's batches."""
    model.load_state_dict(weights)
    generator = seeded_generator(SEED, f"{Purpose.FIT}/0", round, client)
    inputs, labels = (part.double() if part.is_floating_point() else part for part in Toy().tensors(client))
    for batch in [b for _ in range(2) for b in torch.randperm(len(inputs), generator=generator).split(BATCH)][:steps]:
        model.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def mean(models):
    """By the numbers of the clients' samples."""
    total = sum(len(LABELS[client]) for client in models)
    names = next(iter(models.values()))
    return {name: sum(len(LABELS[k]) / total * w[name] for k, w in models.items()) for name in names}


def first_weights():
    """The model before any round."""
    data = Toy(LABELS[:3])
    data.setup()
    model = Federation(FIT, tiny_encoder, seed=SEED).build_models(data)[0].double()
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_partial_work_is_fedavg_with_as_many_steps(three):
    federation, _ = three(2, deadline=12.5, late="partial")
    model, weights = first_weights()
    for round in range(2):
        weights = mean({k: plain_fit(model, weights, k, round, steps) for k, steps in enumerate((6, 6, 4))})
    assert_same(dict(federation.server.weights.as_state()), weights, atol=1e-12)


def test_a_late_update_moves_the_next_model_by_its_discounted_change(three):
    federation, _ = three(2, deadline=20.5, late="next", discount=0.25)
    model, first = first_weights()
    after = [plain_fit(model, first, k, 0, STEPS[k]) for k in range(3)]
    second = mean({0: after[0], 1: after[1]})
    fits = {k: plain_fit(model, second, k, 1, STEPS[k]) for k in (0, 1)}
    fits[2] = {name: w + 0.25 * (after[2][name] - first[name]) for name, w in second.items()}
    assert_same(dict(federation.server.weights.as_state()), mean(fits), atol=1e-12)


# ---------------------------------------------------------------------- one way to be left out


def test_equal_devices_change_nothing():
    with_them, without = (run(FIT, 2, loop=FederatedLoop(3), callbacks=own) for own in ([Stragglers()], []))
    assert_same(whole_state(with_them), whole_state(without))


@pytest.mark.parametrize(("late", "rounds"), [("drop", 2), ("next", 1)])
def test_who_is_left_out_is_as_if_not_asked(tmp_path, late, rounds, recwarn):
    """What clients that drop out keep, or whose updates are still on their way, is what they had before."""
    slow = {"seconds_per_step": [1, 1, 999, 1, 1], "dropout": [0, 1, 0, 0, 0]}
    own = Stragglers(Devices(trace(tmp_path / "t.csv", **slow)), deadline=50, late=late)
    fit = partial(FedPer, lr=0.1)
    got = run(fit, rounds, cohorts=[[0, 1, 2, 3]], callbacks=[own])
    assert not [warning for warning in recwarn if "left out" in str(warning.message)]
    assert_same(whole_state(got), whole_state(run(fit, rounds, cohorts=[[0, 3]])))


def test_rounds_that_nobody_reaches_end_nothing(three):
    """Four of them in a row, the first one of the run among them."""
    with pytest.warns(UserWarning, match=r"round 4 is undone: it is empty, 0 of 3 updates .* the deadline is 2 s"):
        federation, own = three(4, deadline=2, late="drop")
    assert own.simulation.clock == 8
    assert federation.rounds_trained == [0, 0, 0]
    assert_same(dict(federation.server.weights.as_state()), first_weights()[1])


def test_others_are_asked_for_clients_that_are_not_there(tmp_path):
    there = trace(tmp_path / "t.csv", start=[0] * CLIENTS, end=[0, 1e6, 0, 1e6, 1e6])
    federation = run(FIT, 4, loop=FederatedLoop(2), callbacks=[Stragglers(Devices(there))])
    assert sum(federation.rounds_trained) == 8
    assert federation.rounds_trained[0] == federation.rounds_trained[2] == 0


def test_a_client_that_leaves_before_its_end_is_left_out(tmp_path):
    """Of 3, 5 and 4 steps of a second; the spans repeat every 20 s, so that nobody is there at the start of round 2."""
    spans = trace(tmp_path / "t.csv", start=[0, 0, 0], end=[3.5, 4.5, 20])
    own = Stragglers(Devices(spans))
    federation = run(partial(FIT, epochs=1), 1, cohorts=[[0, 1, 2]], data=Toy(LABELS[:3]), callbacks=[own])
    assert federation.rounds_trained == [1, 0, 1]
    assert own.simulation.clock == 4


def test_time_passes_where_nobody_is_there(tmp_path):
    spans = trace(tmp_path / "t.csv", start=[100] * 5, end=[200] * 5)
    own = Stragglers(Devices(spans))
    with pytest.warns(UserWarning, match="round 2 is undone: it is empty, .*it is not there"):
        federation = run(partial(FIT, epochs=1), 3, cohorts=[[0, 1]], callbacks=[own])
    assert own.simulation.clock == 60 + 60 + 5
    assert federation.rounds_trained == [1, 1, 0, 0, 0]


# ---------------------------------------------------------------------- every engine, and a resume


@pytest.mark.parametrize("late", ["partial", "next"])
@pytest.mark.parametrize("engine", [VectorizedEngine(forward="vmap"), TrainerEngine(), ProcessEngine(1)])
def test_engines_agree(three, engine, late):
    options = {"deadline": 12.5, "late": late, "over_selection": 1.5, "fit": partial(FedPer, lr=0.1, epochs=2)}
    (got, own), (expected, other) = (three(3, loop=FederatedLoop(2), engine=e, **options) for e in (engine, None))
    assert_same(whole_state(got), whole_state(expected), atol=1e-9)
    assert (own.simulation.clock, [u.update["client"] for u in own.simulation.pending]) == (
        other.simulation.clock,
        [u.update["client"] for u in other.simulation.pending],
    )


@pytest.mark.parametrize("late", ["partial", "next"])
def test_a_resumed_run_is_as_an_uninterrupted_one(tmp_path, late):
    def played(folder, rounds, **options):
        devices = Devices(spread=1.0, availability=0.7, dropout=0.2)
        own = Stragglers(devices, deadline=25, late=late, over_selection=1.3)
        federation = play(tmp_path / folder, rounds, partial(FedPer, lr=0.1), more=[own], **options)
        return federation, own

    whole, own = played("whole", 6)
    _, before = played("cut", 3)
    resumed, other = played("cut", 6, ckpt_path=str(tmp_path / "cut" / "last.ckpt"))
    assert late == "partial" or before.simulation.pending  # or the test shows nothing
    assert own.simulation.clock == other.simulation.clock
    assert_same(whole_state(resumed), whole_state(whole))
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut")]
    histories = [[{**entry, "seconds": 0} for entry in one["history"]] for one in found]
    assert histories[0] == histories[1]
    assert found[0]["simulated_seconds"] == found[1]["simulated_seconds"] == own.simulation.clock
    assert histories[0][-1]["simulated_seconds"] == own.simulation.clock


class Stops(L.Callback):
    """Ends a fit in the middle of a round, once."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx, hasattr(self, "stopped")) == (3, 0, False):
            self.stopped = True
            raise RuntimeError("stopped")


def test_a_round_that_was_interrupted_is_played_again(three):
    """Client 1, whose update is late in round 4, is no busy client of its second try."""
    expected, _ = three(5, deadline=10.5, late="next", cohorts=([1, 0, 2],))
    own = Stragglers(Devices(expected.trainer.callbacks[1].devices.trace, transfer_seconds=0.5), 10.5, late="next")
    federation, data = Federation(FIT, tiny_encoder, seed=SEED), Toy(LABELS[:3])
    trainer = quiet_trainer(5, GivenCohorts([1, 0, 2]), own, Stops(), precision="64-true")
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.fit(federation, datamodule=data)
    trainer.fit(federation, datamodule=data)
    assert_same(whole_state(federation), whole_state(expected))


def test_late_updates_of_clients_that_share_nothing(three):
    federation, _ = three(2, fit=partial(LocalOnly, lr=0.1, epochs=2), deadline=20.5, late="next")
    assert federation.rounds_trained == [2, 2, 1]


# ---------------------------------------------------------------------- what is drawn, and what it costs


class Names:
    """Data of so many clients, as far as devices ask."""

    def __init__(self, clients, names=()):
        self.num_clients, self.participating, self.client_names = clients, [*range(clients)], names


def test_speeds_are_lognormal_and_stay():
    fleet = Fleet(Devices(seconds_per_step=2.0, spread=0.5), Names(4000), seed=1)
    logs = torch.tensor([math.log(fleet.pace(k, 0.0).seconds_per_step) for k in range(4000)], dtype=torch.float64)
    assert logs.mean() == pytest.approx(math.log(2), abs=0.03)
    assert logs.std() == pytest.approx(0.5, abs=0.02)
    assert fleet.pace(7, 0.0) == fleet.pace(7, 1e6)


def test_availability_and_dropout_are_bernoulli_and_follow_the_day():
    fleet = Fleet(Devices(availability=0.4, diurnal=0.5, day=100.0, dropout=0.3), Names(1), seed=1)
    for clock, expected in ((0.0, 0.6), (25.0, 0.4), (50.0, 0.2), (100.0, 0.6)):
        share = sum(fleet.is_there(k, r, clock) for k in range(60) for r in range(60)) / 3600
        assert share == pytest.approx(expected, abs=0.03)
    assert sum(fleet.drops_out(k, 3) for k in range(3000)) / 3000 == pytest.approx(0.3, abs=0.03)


def test_ten_thousand_clients_cost_no_more_than_those_that_are_asked(tmp_path, monkeypatch):
    count, size = 10_000, 20
    spans = trace(tmp_path / "t.csv", start=[0] * count, end=[0 if k % 4 else 1e9 for k in range(count)])
    fleet, asked = Fleet(Devices(spans, spread=1.0, dropout=0.1), Names(count), seed=3), []
    own = Simulation(fleet, deadline=10, over_selection=1.5, late="drop", discount=0.5)
    for name in ("is_there", "drops_out", "pace"):
        before = getattr(fleet, name)
        monkeypatch.setattr(fleet, name, lambda *a, f=before: asked.append(a) or f(*a))
    clients = Whole(count)
    for round in range(5):
        asked.clear()
        cohort = own.choose(round, draw_clients("cohort", size, count, round), clients)
        assert len(cohort) == 30
        assert all(client % 4 == 0 for client in cohort)
        own.begin_round(round, cohort)
        assert len(asked) < 12 * 30


class Whole:
    """Clients 0 to m - 1, one at a time."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return place

    def __iter__(self):
        raise AssertionError("a loop over all clients")


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "client,seconds_per_step\n0,1\n1,-2\n2,1\n",
            "line 3, client 1: seconds_per_step must be .* 0, got -2.0",
        ),
        ("client,seconds_per_step\n0,1\n1,fast\n2,1\n", "line 3, client 1: seconds_per_step must .*, got 'fast'"),
        ("client,dropout\n0,1\n1,2\n2,1\n", "line 3, client 1: dropout must be between 0 and 1, got 2.0"),
        ("client,dropout\n0,1\n0,1\n", "line 3, client 0: the client has an earlier row"),
        ("client,dropout\n0,1\n", "no row for 2 of 3 clients, such as client 1: give each client one"),
        ("client,dropout\n0,1\nLion,1\n", "line 3, client Lion: there is no client Lion.*'Lyon'.*leave the row out"),
        ("client,start,end\n0,5,4\n", "line 2, client 0: end must be a finite number of at least 5, got 4"),
        (
            "client,start\n0,5\n",
            r"has the columns \['client', 'start'\], expected client, and both .*'end'.* or neither",
        ),
        ("client,speed\n0,5\n", r"a column must be one of .*seconds_per_step.*, got 'speed'"),
        ("", r"has the columns \[\], expected client"),
    ],
)
def test_what_is_wrong_with_a_trace(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        Fleet(Devices(str(path)), Names(3, ("Lyon", "Nice", "Metz")), seed=0)


def test_names_of_clients_and_a_missing_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds_per_step\nNice,3\nLyon,1\n2,5\n")
    fleet = Fleet(Devices(str(path)), Names(3, ("Lyon", "Nice", "Metz")), seed=0)
    assert [fleet.pace(client, 0.0).seconds_per_step for client in range(3)] == [1, 3, 5]
    with pytest.raises(ConfigurationError, match=r"none.csv cannot be read: .*No such file"):
        Fleet(Devices(str(tmp_path / "none.csv")), Names(3), seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stragglers(deadline=0), "deadline must be a finite number above 0"),
        (lambda: Stragglers(over_selection=0.5), "over_selection must be a finite number of at least 1"),
        (lambda: Stragglers(late="wait", deadline=3), "late must be one of"),
        (lambda: Stragglers(late="next"), "needs a deadline"),
        (lambda: Stragglers(deadline=3, late="next", discount=2), "discount must be between 0 and 1"),
        (lambda: Devices(seconds_per_step=-1), "seconds_per_step must be a finite number above 0, got -1"),
        (lambda: Devices(availability=0.8, diurnal=0.5), r"availability times 1 \+ diurnal must be between 0 and 1"),
    ],
)
def test_arguments_out_of_bounds(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_late_updates_of_a_server_that_averages_no_models():
    with pytest.raises(ConfigurationError, match="that of FedProto does not: use late='drop'"):
        run(partial(FedProto, lr=0.1), callbacks=[Stragglers(deadline=5, late="next")])


def test_a_plain_module_is_no_federation():
    with pytest.raises(ConfigurationError, match="Stragglers is for a federation, got BoringModel"):
        quiet_trainer(1, Stragglers()).fit(BoringModel())


def test_privacy_says_itself_who_counts():
    with pytest.raises(ConfigurationError, match="Stragglers and privacy both decide who counts in a round"):
        run(FIT, loop=FederatedLoop(), callbacks=[Stragglers()], store={"privacy": ClientPrivacy(noise_multiplier=1.0)})
