"""A robust rule, an attack, stragglers and privacy in one run: what each sees of the others, resumes, refusals."""

import json
import math
import warnings
from functools import partial

import pytest
import torch
from _helpers.resume import play
from _helpers.toy import CLIENTS, assert_same, for_toy, run, whole_state

from pfl_lightning import VectorizedEngine
from pfl_lightning.callbacks import Attack, Devices, FederatedLoop, Stragglers
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import SCAFFOLD, FedAvg, FedPAC, FedPer, FedProto
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.robust import CoordinateMedian, MultiKrum

METHOD = partial(FedPer, lr=0.05, epochs=2)
ENGINES = [pytest.param(None, id="sequential"), pytest.param(VectorizedEngine(forward="vmap"), id="vectorized")]


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setenv("PFL_PRIVACY_SEED", "17")


@pytest.fixture
def trace(tmp_path):
    """Client 4 takes 39 times as long as the others: 156 s for its fit, which the others end in 10 s."""
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds_per_step\n0,1\n1,1\n2,1\n3,1\n4,39\n")
    return str(path)


def quietly(function, *given, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*given, **options)


# ---------------------------------------------------------------------- what each sees of the others


def test_a_liar_that_is_late_is_left_out_when_it_arrives(trace):
    """Its update is forged in the round of its fit, and judged in the one in which the server would take it."""
    attack, loop = Attack("scaling", liars=[4], scale=500.0), FederatedLoop()
    own = Stragglers(Devices(trace), deadline=150, late="next", discount=1.0)
    rule = MultiKrum(1, tolerance=3.0)
    federation = quietly(run, METHOD, 3, loop=loop, callbacks=[attack, own], store={"robust": rule})
    assert own.simulation.clock > 156
    assert loop.left_out == {4: 1}
    assert federation.rounds_trained[4] == 0


def test_a_client_with_less_work_is_no_liar(trace):
    """Three local steps of four, which the filter takes as it takes the others' updates."""
    loop = FederatedLoop()
    own = Stragglers(Devices(trace), deadline=150, late="partial")
    federation = run(METHOD, 2, loop=loop, callbacks=[own], store={"robust": MultiKrum(1, tolerance=3.0)})
    assert loop.left_out == {}
    assert federation.rounds_trained == [2] * CLIENTS


def test_the_median_of_a_round_is_that_of_those_in_time(trace):
    own = Stragglers(Devices(trace), deadline=50, late="drop")
    late = run(METHOD, 2, callbacks=[own], store={"robust": CoordinateMedian()})
    without = run(METHOD, 2, cohorts=[range(4)], store={"robust": CoordinateMedian()})
    assert_same(late.server.weights.as_state(), without.server.weights.as_state())


@pytest.mark.parametrize("bound", [0.5, 0.05])
def test_a_liar_moves_a_private_server_by_its_bound_at_most(bound):
    """Twice the bound S, from one end to the other, over q m clients; the noise is the same and cancels out."""
    privacy = ClientPrivacy(0.01, clip_norm=bound, max_epsilon=None)

    def go(*callbacks):
        made = partial(FedAvg, lr=0.05, epochs=2)
        return run(made, 1, loop=FederatedLoop(1.0), callbacks=callbacks, store={"privacy": privacy}).server

    plain, attacked = (one.weights.as_state() for one in (go(), go(Attack("sign_flip", liars=[2], scale=900.0))))
    moved = math.hypot(*(float((attacked[name] - plain[name]).norm()) for name in plain))
    assert 0.5 * bound / CLIENTS < moved <= 2 * bound / CLIENTS + 1e-6


# ---------------------------------------------------------------------- resume


def filtered(trace):
    return [Attack("noise", liars=[2])], {"robust": MultiKrum(1)}


def filtered_late(trace):
    return [Stragglers(Devices(trace, dropout=0.2), deadline=150, late="next")], {"robust": CoordinateMedian()}


def filtered_partial(trace):
    more = [Attack("inner_product", liars=[1]), Stragglers(Devices(trace), deadline=150, late="partial")]
    return more, {"robust": MultiKrum(1, tolerance=1.6)}


def lying_late(trace):
    return [Attack("alie", liars=[1, 4]), Stragglers(Devices(trace), deadline=150, late="next")], {}


def lying_private(trace):
    return [Attack("sign_flip", liars=[2])], {"privacy": ClientPrivacy(0.5)}


def poisoned(trace):
    return [Attack("label_flip", liars=[2])], {"robust": MultiKrum(1, tolerance=1.2, colluding=True)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "pair", [filtered, filtered_late, filtered_partial, lying_late, lying_private, poisoned], ids=lambda f: f.__name__
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, trace, pair, engine):
    def go(folder, rounds, **options):
        more, store = pair(trace)
        cohort = 3 if "privacy" in store else CLIENTS
        return quietly(
            play, tmp_path / folder, rounds, METHOD, cohort=cohort, more=more, store=store, engine=engine, **options
        )

    whole = go("whole", 4)
    go("parts", 2)
    resumed = go("parts", 4, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    first, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "parts"))
    for name in ("attack", "left_out", "simulated_seconds", "privacy", "bytes", "rounds_trained"):
        assert first.get(name) == second.get(name), name


@pytest.mark.parametrize("pair", [filtered, filtered_late, lying_private], ids=lambda f: f.__name__)
def test_engines_agree(trace, pair):
    states = []
    for engine in (None, VectorizedEngine(forward="vmap")):
        more, store = pair(trace)
        loop = FederatedLoop(3 if "privacy" in store else CLIENTS)
        states.append(whole_state(quietly(run, METHOD, 3, loop=loop, callbacks=more, store=store, engine=engine)))
    assert_same(states[1], states[0], atol=1e-4)


# ---------------------------------------------------------------------- what is refused, and what is said


def test_too_few_in_time_for_the_rule_is_said_of_whom(trace):
    """In a first round, too: nobody lies, the round is empty. The next one follows."""
    own = Stragglers(Devices(trace), deadline=50, late="drop")
    said = (
        r"round 1 is undone: 4 updates arrived, and MultiKrum\(byzantine=1\) needs 5\. client 4, round 1: .*; the next"
    )
    with pytest.warns(UserWarning, match=said):
        federation = run(METHOD, 2, callbacks=[own], store={"robust": MultiKrum(1)})
    assert federation.rounds_trained == [0] * CLIENTS


def test_a_rule_that_lacks_updates_says_what_to_do():
    with pytest.raises(FederationError, match=r"round 1: 3 updates arrived, and MultiKrum\(byzantine=1\) needs 5"):
        run(METHOD, 1, cohorts=[range(3)], store={"robust": MultiKrum(1)})
    said = r"round 2 is undone: 3 updates arrived.*; look at these clients, or use larger cohorts, or a smaller"
    with pytest.warns(UserWarning, match=said):
        run(METHOD, 2, cohorts=[range(5), range(3)], store={"robust": MultiKrum(1)})


@pytest.mark.parametrize("late", ["drop", "partial"])
def test_privacy_and_stragglers_exclude_each_other(late):
    own = Stragglers(deadline=5, late=late)
    with pytest.raises(ConfigurationError, match=r"Stragglers and privacy both decide who counts.*use one of them"):
        run(METHOD, loop=FederatedLoop(), callbacks=[own], store={"privacy": ClientPrivacy(1.0)})


@pytest.mark.parametrize(("method", "field"), [(FedPAC, "variance"), (SCAFFOLD, "control")])
def test_an_attack_does_not_lift_what_privacy_refuses(method, field):
    options = {"momentum": 0.0} if method is SCAFFOLD else {}
    with pytest.raises(ConfigurationError, match=f"{method.__name__} does not support privacy: .*{field}"):
        run(
            for_toy(method, **options),
            loop=FederatedLoop(),
            callbacks=[Attack(liars=[1])],
            store={"privacy": ClientPrivacy(1.0)},
        )


def test_late_updates_of_prototypes_are_refused_under_a_filter_too():
    own = Stragglers(deadline=5, late="next")
    with pytest.raises(ConfigurationError, match="that of FedProto does not: use late='drop'"):
        run(for_toy(FedProto), callbacks=[own], store={"robust": MultiKrum(1)})


def test_finite_numbers_stay():
    """All that may be combined, at once."""
    attack = Attack("sign_flip", liars=[2])
    own = Stragglers(Devices(dropout=0.1, spread=1.0), deadline=100, late="partial")
    store = {"robust": CoordinateMedian(max_norm=1.0)}
    federation = quietly(run, METHOD, 3, callbacks=[attack, own], store=store)
    assert all(torch.isfinite(t).all() for t in whole_state(federation).values() if t.is_floating_point())
