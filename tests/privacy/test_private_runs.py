"""Runs with privacy: engines, resumes, empty rounds, budgets, and what is refused."""

import json
from functools import partial

import pytest
import torch
from _helpers.project import Net
from _helpers.resume import play
from _helpers.toy import CLIENTS, SEED, GivenCohorts, Toy, assert_same, normed_encoder, quiet_trainer, run, whole_state

from pfl_lightning import VectorizedEngine, federate, methods
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter, RoundProgress
from pfl_lightning.engines import ProcessEngine, TrainerEngine
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import DCPFL, FedAvg, FedPAC, FedProto
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.privacy.accountant import epsilon
from pfl_lightning.server_optimizers import FedAdam

METHOD = partial(FedAvg, lr=0.05, epochs=1)
PRIVACY = {"privacy": ClientPrivacy(0.5)}


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PFL_PRIVACY_SEED", "17")


def private(rounds, method=METHOD, cohort=0.5, privacy=None, **options):
    store = {"privacy": ClientPrivacy(0.5) if privacy is None else privacy, **options.pop("store", {})}
    return run(method, rounds, loop=options.pop("loop", None) or FederatedLoop(cohort), store=store, **options)


@pytest.mark.parametrize("method", [METHOD, partial(FedPAC, epochs=1, combination=False), partial(FedProto, epochs=1)])
def test_engines_agree(method):
    one, many, trainer = (private(2, method, engine=e) for e in (None, VectorizedEngine(), TrainerEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-4)
    assert_same(whole_state(trainer), whole_state(one), atol=1e-4)


def test_worker_processes_agree():
    assert_same(whole_state(private(2, engine=ProcessEngine(1))), whole_state(private(2)))


@pytest.mark.parametrize("method", [METHOD, partial(DCPFL, epochs=1)], ids=["FedAvg", "DCPFL"])
def test_a_resume_counts_on_and_draws_the_same(tmp_path, method, monkeypatch):
    quantile = 0.5 if method is METHOD else None

    def go(folder, rounds, **options):
        return play(folder, rounds, method, store={"privacy": ClientPrivacy(0.5, quantile=quantile)}, **options)

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 2)
    monkeypatch.setenv("PFL_PRIVACY_SEED", "99")  # the checkpoint's counts
    resumed = go(tmp_path / "parts", 4, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    assert resumed.rounds_trained == whole.rounds_trained
    assert resumed.mechanism.state_dict() == whole.mechanism.state_dict()
    first, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "parts"))
    assert first["privacy"] == second["privacy"]
    assert first["privacy"]["rounds"] == 4
    assert first["privacy"]["epsilon"] == pytest.approx(epsilon(((0.5, 3 / CLIENTS, 4),), CLIENTS**-1.1))
    assert first["method_arguments"]["privacy"]["noise_multiplier"] == 0.5
    for path in (tmp_path / "whole").rglob("*.*"):
        assert path.suffix == ".ckpt" or b"secret" not in path.read_bytes(), path


def test_a_checkpoint_without_privacy_is_refused(tmp_path):
    play(tmp_path, 1, METHOD)
    with pytest.raises(CheckpointError, match="of another setting of privacy, off; this run has on"):
        play(tmp_path, 2, METHOD, store=PRIVACY, ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_round_without_clients_is_a_round(tmp_path, capsys):
    callbacks = [ResultsWriter(str(tmp_path)), RoundProgress()]
    federation = private(3, cohort=0.001, callbacks=callbacks, data=Toy())
    assert federation.rounds_trained == [0] * CLIENTS
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rounds"] == results["privacy"]["rounds"] == 3
    assert [entry["round"] for entry in results["history"]] == [1, 2, 3]
    assert "epsilon" in capsys.readouterr().out


def test_the_mean_has_a_fixed_denominator():
    """With hardly any noise and no clipping: x + sum of changes / (q m), whoever took part, whatever their samples."""
    federation = private(1, privacy=ClientPrivacy(1e-6, clip_norm=1e3, max_epsilon=None))
    start = run(METHOD, 1, cohorts=[[0]], store={"server_optimizer": partial(torch.optim.SGD, lr=0.0)})
    x, found = start.server.weights.as_state(), federation.server.weights.as_state()
    cohort = [client for client, rounds in enumerate(federation.rounds_trained) if rounds]
    assert 0 < len(cohort) < CLIENTS
    own = [run(METHOD, 1, cohorts=[[client]]).server.weights.as_state() for client in cohort]
    for name in x:
        expected = x[name] + sum(one[name] - x[name] for one in own) / (0.5 * CLIENTS)
        torch.testing.assert_close(found[name], expected, rtol=0, atol=5e-3)


def test_the_last_round_of_all_clients_is_counted_as_such():
    federation = private(3, loop=FederatedLoop(0.4, full_participation_in_last_round=True))
    assert federation.mechanism.spent == [(0.5, 0.4, 2), (0.5, 1.0, 1)]
    assert min(federation.rounds_trained) >= 1


def test_a_round_that_is_undone_counts():
    class Spoils(FedAdam):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["params"][0].data.fill_(float("nan"))

    with pytest.warns(UserWarning, match="round 2 is undone"):
        federation = private(2, store={"server_optimizer": Spoils})
    assert federation.mechanism.rounds == 2


def test_a_server_optimizer_steps_along_the_private_mean():
    halved = private(1, store={"server_optimizer": partial(torch.optim.SGD, lr=0.5)}).server.weights.as_state()
    zero = private(1, store={"server_optimizer": partial(torch.optim.SGD, lr=0.0)}).server.weights.as_state()
    for name, w in private(1).server.weights.as_state().items():
        torch.testing.assert_close(halved[name], (w + zero[name]) / 2)


@pytest.mark.parametrize("form", ["federate", "callback"])
def test_a_users_module(form):
    net, toy = Net(), Toy()
    if form == "federate":
        module, data = federate(net, toy, FedAvg, seed=SEED, **PRIVACY)
        quiet_trainer(2, FederatedLoop(0.5)).fit(module, datamodule=data)
        federation = module
    else:
        loop = FederatedLoop(0.5, method=FedAvg, seed=SEED, **PRIVACY)
        quiet_trainer(2, loop).fit(net, datamodule=toy)
        federation = loop.federation
    assert federation.mechanism.rounds == 2


# ---------------------------------------------------------------------- budgets


def test_rounds_that_exceed_the_budget_are_refused_with_how_many_fit():
    privacy = ClientPrivacy(1.0, max_epsilon=3.0, delta=0.01)
    with pytest.raises(
        ConfigurationError, match=r"the 40 rounds planned would spend epsilon .* at most 12 rounds are possible"
    ):
        private(40, privacy=privacy, cohort=0.2)
    assert epsilon(((1.0, 0.2, 12),), 0.01) <= 3.0 < epsilon(((1.0, 0.2, 13),), 0.01)


def test_a_run_may_stop_before_its_budget_is_exceeded(tmp_path):
    privacy = ClientPrivacy(1.0, max_epsilon=2.0, delta=0.01, stop=True)

    def go(**options):
        return play(tmp_path, 40, METHOD, cohort=1, store={"privacy": privacy}, **options)

    federation = go()
    spent = federation.mechanism.rounds
    assert federation.mechanism.epsilon() <= 2.0 < federation.mechanism.epsilon((0.2, 1))
    assert go(ckpt_path=str(tmp_path / "last.ckpt")).mechanism.rounds == spent  # and stays so


def test_a_first_round_beyond_the_budget_is_refused():
    with pytest.raises(ConfigurationError, match="one more round would exceed max_epsilon"):
        private(2, privacy=ClientPrivacy(0.3, max_epsilon=0.1, stop=True))


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (methods.HypCluster, r"HypClusterUpdate.cluster, which tells the choice"),
        (methods.FedPAC, r"FedPACUpdate.variance, which tells the feature variance"),
        (methods.SCAFFOLD, r"ScaffoldUpdate.control_change, which tells the weights"),
        (methods.FD, r"FDUpdate.scores, which tells the class scores"),
        (methods.LocalOnly, r"its clients send nothing"),
        (methods.FedAMP, r"its server does more with updates than average them"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_bounded_is_named(method, field):
    with pytest.raises(ConfigurationError, match=f"{method.__name__} does not support privacy: .*{field}"):
        private(1, partial(method, epochs=1))


def test_running_statistics_are_refused():
    with pytest.raises(ConfigurationError, match=r"weights\['encoder.1.running_mean'\] is a running statistic"):
        private(1, encoder=normed_encoder)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (GivenCohorts([0]), "GivenCohorts.sample_cohort chooses the clients of a round"),
        (FederatedLoop(0.5, min_clients=2), "min_clients is 2, but with privacy a round counts"),
    ],
)
def test_what_would_make_the_accounts_wrong_is_refused(loop, message):
    with pytest.raises(ConfigurationError, match=message):
        private(1, loop=loop)


def test_what_is_no_privacy_is_refused():
    with pytest.raises(ConfigurationError, match=r"privacy must be a ClientPrivacy\(noise_multiplier=...\)"):
        private(1, privacy=1.0)
