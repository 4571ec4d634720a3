"""Robust rules in rounds: which methods take them, who is left out, and what stays as it was."""

import json
import warnings
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, named, put, sgd
from _helpers.project import Net
from _helpers.resume import play
from _helpers.toy import CLIENTS, SEED, GivenCohorts, Toy, assert_same, for_toy, quiet_trainer, run, whole_state

from pfl_lightning import Federation, ProcessEngine, VectorizedEngine, federate, methods
from pfl_lightning.callbacks import Attack, FederatedLoop
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import SCAFFOLD, Ditto, FedAvg, FedPAC, FedPer, FedProto, LocalOnly
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from pfl_lightning.server_optimizers import FedAvgM

LR = 0.05
METHOD = partial(FedAvg, lr=LR, epochs=1)
AVERAGES = (CoordinateMedian(), TrimmedMean(1), GeometricMedian(), CenteredClipping())


def restate(data, rounds, combine):
    """The global model of FedAvg, whose mean is replaced."""
    net = first_net()
    for round in range(rounds):
        trained = []
        for client in range(CLIENTS):
            local = copy_of(net)
            sgd(local, batches(data, client, round, "fit/0", 1), list(local.parameters()), LR)
            trained.append(named(local))
        put(net, {name: combine(torch.stack([one[name] for one in trained])) for name in trained[0]})
    return named(net)


@pytest.mark.parametrize(
    ("rule", "combine"),
    [
        (CoordinateMedian(), lambda values: values.median(0).values),  # of five
        (TrimmedMean(1), lambda values: values.sort(0).values[1:4].mean(0)),
    ],
)
def test_rounds_equal_the_restatement(rule, combine):
    federation = run(METHOD, 3, store={"robust": rule})
    assert_same(named(federation.client_model(1)), restate(Toy(), 3, combine), atol=2e-6)


def test_a_servers_optimizer_steps_from_the_rules_result():
    rule = CoordinateMedian()
    whole = run(METHOD, 1, store={"robust": rule})
    half = run(METHOD, 1, store={"robust": rule, "server_optimizer": partial(FedAvgM, lr=0.5, momentum=0.0)})
    start = named(first_net())
    for name, expected in named(whole.client_model(0)).items():
        torch.testing.assert_close(named(half.client_model(0))[name], (start[name] + expected) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [*AVERAGES, MultiKrum(1), NormClipping(0.05)], ids=repr)
def test_engines_agree(rule):
    one, many = (run(METHOD, 2, engine=engine, store={"robust": rule}) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_workers_agree():
    one, many = (run(FedPAC, 2, engine=e, store={"robust": MultiKrum(1)}) for e in (None, ProcessEngine(2)))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_a_filter_that_leaves_nobody_out_changes_nothing():
    plain, filtered = run(FedPAC, 2), run(FedPAC, 2, store={"robust": MultiKrum(1, tolerance=1e9)})
    assert_same(whole_state(filtered), whole_state(plain))


def test_a_bound_that_is_wide_changes_nothing():
    assert_same(whole_state(run(METHOD, 2, store={"robust": NormClipping(1e6)})), whole_state(run(METHOD, 2)))


# ---------------------------------------------------------------------- liars


@pytest.mark.parametrize("method", [FedAvg, FedPAC, FedProto, methods.DCPFL, methods.Calibre, methods.FedClassAvg])
def test_who_lies_is_left_out_and_named_once(method):
    loop = FederatedLoop()
    with pytest.warns(UserWarning, match="leaves its update out") as caught:
        run(
            for_toy(method, epochs=1),
            3,
            loop=loop,
            callbacks=[Attack("scaling", liars=[2], scale=50.0)],
            store={"robust": MultiKrum(1, tolerance=5.0)},
        )
    said = [str(one.message) for one in caught if "leaves its update out" in str(one.message)]
    assert [text.partition(":")[0] for text in said] == ["left out of the aggregation"]
    assert "client 2, round 1" in said[0]
    assert loop.left_out == {2: 3}
    assert loop.traffic.up.total() > 0


def test_bytes_of_what_is_left_out_are_counted():
    loops = [FederatedLoop(), FederatedLoop()]
    run(METHOD, 1, loop=loops[0])
    run(METHOD, 1, loop=loops[1], store={"robust": MultiKrum(1)})
    assert loops[0].traffic.up == loops[1].traffic.up
    assert loops[1].left_out.total() == 1


class Breaks(L.Callback):
    """A client sends what is no valid message."""

    def __init__(self, change, clients=(2,)):
        self.change, self.clients = change, clients

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            pl_module._current_round.let_forge(self.forge)

    def forge(self, results, sent):
        for result in results:
            if result.client in self.clients:
                changed = {n: self.change(t) for n, _, t in result.update.tensors()}
                object.__setattr__(result, "update", result.update.with_named(changed))
            yield result


@pytest.mark.parametrize("change", [lambda t: t * float("nan"), lambda t: t[:1].flatten(), lambda t: t * 1e9])
@pytest.mark.parametrize("robust", [MultiKrum(1), CoordinateMedian()])
def test_updates_that_are_no_messages_do_not_end_the_run(change, robust):
    """Who sends them has been found: nobody else is left out."""
    loop = FederatedLoop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federation = run(METHOD, 4, loop=loop, callbacks=[Breaks(change)], store={"robust": robust})
    assert federation.rounds_trained == [4, 4, 0, 4, 4]
    assert loop.left_out == {}


def test_a_round_with_too_few_updates_is_undone():
    loop = GivenCohorts(range(5), range(4))
    with pytest.warns(UserWarning, match=r"round 2 is undone: 4 updates arrived, and MultiKrum\(byzantine=1\) needs 5"):
        federation = run(METHOD, 2, loop=loop, store={"robust": MultiKrum(1)})
    assert sum(federation.rounds_trained) == 4


def test_a_first_round_with_too_few_updates_ends_the_run():
    with pytest.raises(FederationError, match=r"round 1: 3 updates arrived, and MultiKrum\(byzantine=1\) needs 5"):
        run(METHOD, 2, cohorts=[range(3)], store={"robust": MultiKrum(1)})


def test_a_client_that_is_left_out_keeps_its_own_model():
    """It does not know; a client's part of a sum that the server keeps is undone, though."""
    attack = Attack("scaling", liars=[2], scale=500.0)
    federation = run(partial(FedPer, epochs=1), 1, callbacks=[attack], store={"robust": MultiKrum(1)})
    plain = run(partial(FedPer, epochs=1), 1)
    assert_same(federation.personal.get(2), plain.personal.get(2))
    assert federation.rounds_trained == [1, 1, 0, 1, 1]
    kept = run(partial(SCAFFOLD, epochs=1, momentum=0.0), 1, callbacks=[attack], store={"robust": MultiKrum(1)})
    controls = [t for n, t in kept.personal.get(2).items() if n.startswith("own_control")]
    assert controls
    assert all(not t.any() for t in controls)


# ---------------------------------------------------------------------- what is refused before the first round


@pytest.mark.parametrize(
    ("rule", "cohort", "said"),
    [
        (MultiKrum(2), 1.0, r"MultiKrum\(byzantine=2\) needs cohorts of at least 7 clients, a round has 5"),
        (Krum(1), 4, r"Krum\(byzantine=1\) needs cohorts of at least 5 clients, a round has 4"),
        (MultiKrum(0, keep=6), 1.0, "needs cohorts of at least 6 clients"),
        (TrimmedMean(2), 4, r"TrimmedMean\(byzantine=2\) needs cohorts of at least 5 clients, a round has 4"),
    ],
)
def test_cohorts_that_are_too_small(rule, cohort, said):
    with pytest.raises(ConfigurationError, match=said):
        run(METHOD, loop=FederatedLoop(cohort), store={"robust": rule})


@pytest.mark.parametrize("rule", AVERAGES, ids=repr)
@pytest.mark.parametrize("method", [FedPAC, FedProto, methods.DCPFL, methods.FedGH, methods.Calibre, SCAFFOLD])
def test_a_rule_for_averages_names_the_filter(method, rule):
    options = {"momentum": 0.0} if method is SCAFFOLD else {}
    said = rf"replaces an average, but the server of {method.__name__} does more.*use MultiKrum\(byzantine=f\)"
    with pytest.raises(ConfigurationError, match=said):
        run(for_toy(method, **options), store={"robust": rule})


def test_a_method_without_updates_has_nothing_to_judge():
    for rule in (MultiKrum(1), CoordinateMedian(), NormClipping(1.0)):
        with pytest.raises(ConfigurationError, match="has nothing to judge: clients of LocalOnly send no updates"):
            run(LocalOnly, store={"robust": rule})


def test_a_bound_of_weights_where_none_travel():
    with pytest.raises(ConfigurationError, match="max_norm bounds weights, and clients of FedProto send none"):
        run(FedProto, store={"robust": NormClipping(1.0)})


@pytest.mark.parametrize(("rule", "holds"), [(MultiKrum(1), True), (NormClipping(1.0), False)])
def test_a_rule_says_what_it_holds(monkeypatch, rule, holds):
    said = []
    monkeypatch.setattr("pfl_lightning.robust.rules.rank_zero_info", said.append)
    run(METHOD, store={"robust": rule})
    assert [text.partition(",")[0] for text in said] == ["MultiKrum holds the 5 updates of a round"] * holds


def test_more_updates_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr("pfl_lightning.robust.rules.memory_of", lambda device: 1000.0)
    with pytest.raises(ConfigurationError, match=r"the 5 updates of a round, .* GB of weights, and cpu has 1e-06 GB"):
        run(METHOD, store={"robust": MultiKrum(1)})
    run(METHOD, store={"robust": NormClipping(1.0)})  # holds nothing


def test_a_rule_and_privacy_exclude_each_other():
    with pytest.raises(ConfigurationError, match="use either robust or privacy"):
        Federation(METHOD, "mlp", robust=MultiKrum(1), privacy=ClientPrivacy(noise_multiplier=1.0))


@pytest.mark.parametrize("wrong", [MultiKrum, "MultiKrum", 3])
def test_what_is_no_rule(wrong):
    with pytest.raises(ConfigurationError, match="robust must be a rule, such as MultiKrum"):
        Federation(METHOD, "mlp", robust=wrong)


# ---------------------------------------------------------------------- resume, results, projects


@pytest.mark.parametrize("method", [METHOD, partial(FedPAC, epochs=1), partial(Ditto, epochs=1)])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, method):
    attack = ("noise", [2])

    def go(folder, rounds, **options):
        more = [Attack(*attack)]
        return play(folder, rounds, method, cohort=5, more=more, store={"robust": MultiKrum(1)}, **options)

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 2)
    resumed = go(tmp_path / "parts", 4, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    texts = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "parts")]
    assert texts[0]["left_out"] == texts[1]["left_out"] == {"2": 4}
    assert texts[0]["method_arguments"]["robust"] == "MultiKrum(byzantine=1)"
    assert texts[0]["attack"] == texts[1]["attack"]


def test_going_on_under_another_rule_is_told(tmp_path):
    play(tmp_path, 1, METHOD, cohort=5, store={"robust": MultiKrum(1)})
    with pytest.warns(UserWarning, match=r"made with robust 'MultiKrum\(byzantine=1\)', this run has 'None'"):
        play(tmp_path, 2, METHOD, cohort=5, ckpt_path=str(tmp_path / "last.ckpt"))


def test_results_without_a_rule_are_as_ever(tmp_path):
    play(tmp_path, 1, METHOD)
    assert not {"left_out", "attack"} & json.loads((tmp_path / "results.json").read_text()).keys()


@pytest.mark.parametrize("form", ["federate", "callback"])
def test_a_users_module(form):
    toy, rule = Toy(), CoordinateMedian()
    if form == "federate":
        module, data = federate(Net(), toy, FedAvg, robust=rule, seed=SEED)
        quiet_trainer(2, FederatedLoop()).fit(module, datamodule=data)
        net = module.given_module
    else:
        net = Net()
        quiet_trainer(2, FederatedLoop(method=FedAvg, robust=rule, seed=SEED)).fit(net, datamodule=toy)
    found = {n.replace("body.", "encoder.").replace("fc.", "head."): p for n, p in named(net).items()}
    assert_same(found, restate(toy, 2, lambda values: values.median(0).values), atol=2e-6)


def test_the_page_has_an_error_for_a_loop_without_a_method():
    with pytest.raises(ConfigurationError, match="FederatedLoop got robust and no method: add one"):
        FederatedLoop(robust=MultiKrum(1))
