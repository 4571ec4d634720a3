"""Clients that lie: what each attack sends, whose data are poisoned, and what is seen of it."""

import csv
import json
import math
from statistics import fmean

import lightning as L
import pytest
import torch
from _helpers.resume import play
from _helpers.toy import CLASSES, CLIENTS, Toy, assert_same, for_toy, quiet_trainer, run, tiny_encoder, whole_state

from pfl_lightning import Federation, ProcessEngine, VectorizedEngine
from pfl_lightning.callbacks import Attack, FederatedLoop, RoundProgress
from pfl_lightning.callbacks.attacks import ATTACKS, triggered
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import DCPFL, FedAvg, FedPAC, FedProto

METHOD = for_toy(FedAvg, epochs=1)


class Records(L.Callback):
    """Updates as clients have made them, and as they were sent."""

    def __init__(self):
        self.made, self.sent, self.broadcasts = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            pl_module._current_round.let_forge(self.see)

    def see(self, results, sent):
        self.broadcasts.append(dict(sent))
        (self.made if len(self.made) <= len(self.sent) else self.sent).append({r.client: r.update for r in results})
        return results


def changes(method, kind, liars=(1, 3), **options):
    """Changes of what was sent, as made and as sent, in the first round: by client and tensor."""
    before, after = Records(), Records()
    run(method, 1, callbacks=[before, Attack(kind, list(liars), **options), after], limit_val_batches=0)

    def of(updates, sent):
        found = {}
        for client, update in updates.items():
            known = {n: t for n, _, t in sent[client].tensors()}
            found[client] = {n: t - known[n] if n in known else t for n, _, t in update.tensors()}
        return found

    return of(before.made[0], before.broadcasts[0]), of(after.made[0], after.broadcasts[0])


FACTORS = {"sign_flip": -10.0, "scaling": 10.0, "free_rider": 0.0}


@pytest.mark.parametrize("kind", FACTORS)
def test_steps_are_multiplied(kind):
    made, sent = changes(METHOD, kind)
    for client in range(CLIENTS):
        factor = FACTORS[kind] if client in (1, 3) else 1.0
        for name, step in made[client].items():
            torch.testing.assert_close(sent[client][name], factor * step, rtol=1e-4, atol=1e-5)


def test_noise_has_the_scale_of_the_step():
    made, sent = changes(METHOD, "noise", scale=5.0)
    for name, step in made[1].items():
        assert not torch.equal(sent[1][name], sent[3][name])
        if step.numel() >= 20:
            ratio = float(sent[1][name].square().mean().sqrt() / step.square().mean().sqrt())
            assert 5 * (1 - 3 / math.sqrt(step.numel())) < ratio < 5 * (1 + 3 / math.sqrt(step.numel()))


def test_a_little_is_enough_is_the_liars_mean_minus_deviations():
    made, sent = changes(METHOD, "alie", scale=1.5)
    for name in made[1]:
        own = torch.stack([made[1][name], made[3][name]]).double()
        expected = own.mean(0) - 1.5 * own.std(0, correction=0)
        for client in (1, 3):
            torch.testing.assert_close(sent[client][name].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("honest", "liars", "place"), [(38, 12, 0.631578), (7, 3, 0.571428), (3, 2, 0.666666)])
def test_z_max_is_that_of_the_paper(honest, liars, place):
    """Algorithm 3: s = floor(n / 2 + 1) - m, z with phi(z) below (n - m - s) / (n - m)."""
    z = Attack._deviations(honest, liars)
    assert 0.5 * (1 + math.erf(z / math.sqrt(2))) == pytest.approx(place, abs=1e-5)


def test_inner_products_are_those_of_the_honest_mean():
    made, sent = changes(METHOD, "inner_product", scale=3.0)
    for name in made[0]:
        expected = -3 * torch.stack([made[client][name] for client in (0, 2, 4)]).mean(0)
        torch.testing.assert_close(sent[1][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [FedPAC, FedProto, DCPFL])
@pytest.mark.parametrize("kind", ATTACKS)
def test_statistics_stay_what_a_server_takes(method, kind, recwarn):
    federation = run(for_toy(method, epochs=1), 1, callbacks=[Attack(kind, [1])], limit_val_batches=0)
    assert federation.rounds_trained == [1] * CLIENTS, [str(one.message) for one in recwarn]


@pytest.mark.parametrize("engine", [None, VectorizedEngine(), ProcessEngine(2)])
def test_labels_are_turned_around(engine):
    """In every engine, and no one else's."""

    def turn(inputs, targets):
        targets[11:28] = CLASSES - 1 - targets[11:28]  # those of client 1

    attacked = run(METHOD, 2, callbacks=[Attack("label_flip", [1])], engine=engine, limit_val_batches=0)
    expected = run(METHOD, 2, data=Toy(change=turn), limit_val_batches=0)
    assert_same(whole_state(attacked), whole_state(expected), atol=1e-5)


def test_data_are_as_they_were_afterwards():
    data = Toy()
    run(METHOD, 1, data=data, callbacks=[Attack("label_flip", [1])])
    assert data.client_data(1).train.targets.tolist() == data.labels[1]


def test_a_trigger_is_a_corner():
    marked = triggered(torch.zeros(2, 3, 9, 9, dtype=torch.uint8))
    assert marked.sum().item() == 2 * 3 * 9 * 255
    assert marked[:, :, 6:, 6:].min() == 255
    assert triggered(torch.zeros(1, 6)).tolist() == [[0, 0, 0, 0, 1, 1]]


def test_a_backdoor_is_planted_and_measured():
    attack = Attack("backdoor", [0, 1, 2], target=4, scale=2.0)
    run(for_toy(FedAvg, epochs=5), 10, callbacks=[attack])
    without = Attack("backdoor", [0, 1, 2], target=4, scale=0.0)
    run(for_toy(FedAvg, epochs=5), 10, callbacks=[without])
    assert attack.seen["backdoor/success"] > 0.8 > without.seen["backdoor/success"]


def test_who_lies_is_drawn_by_the_seed():
    drawn = []
    for seed in (0, 0, 1, 2, 3):
        attack = Attack(liars=2, seed=seed)
        run(METHOD, 1, callbacks=[attack], limit_val_batches=0)
        drawn.append(attack.lying)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    assert {len(own) for own in drawn} == {2}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Attack("nothing"), "kind must be"),
        (lambda: Attack(liars=1.5), "liars must be between 0 and 1"),
        (lambda: Attack(liars=-1), "liars must be"),
        (lambda: Attack(scale=-1.0), "scale must be"),
    ],
)
def test_arguments_are_checked(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (Attack(liars=[7]), r"liars are \[7\], expected some, not all, of the participating clients"),
        (Attack(liars=CLIENTS), "some, not all"),
        (Attack("backdoor", [1], target=CLASSES), "target must be one of the classes 0 to 4, got 5"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(attack, said):
    with pytest.raises(ConfigurationError, match=said):
        run(METHOD, 1, callbacks=[attack])


def test_all_figures_are_of_honest_clients_and_the_liars_are_apart(tmp_path, capsys):
    seen = [Attack("sign_flip", [1, 3]), RoundProgress()]
    federation = play(tmp_path, 2, METHOD, cohort=CLIENTS, more=seen)
    results = json.loads((tmp_path / "results.json").read_text())
    assert federation.test_scores.keys() == {0, 2, 4}
    assert federation.evaluation.liars["test"].keys() == {1, 3}
    parts = {False: federation.test_scores, True: federation.evaluation.liars["test"]}
    own = {lie: fmean(score.accuracy for score in scores.values()) for lie, scores in parts.items()}
    assert federation.evaluation.summary["test_accuracy/mean"] == pytest.approx(own[False])
    assert f", test {100 * own[False]:.2f} % of honest clients, " in capsys.readouterr().out.splitlines()[-1]
    assert results["accuracy"]["last"]["test"]["mean"] == pytest.approx(own[False])
    assert results["attack"]["last"]["test_accuracy/liars"] == pytest.approx(own[True])
    assert results["attack"]["liars"] == [1, 3]
    assert results["evaluated_clients"] == 3
    rows = list(csv.DictReader((tmp_path / "clients.csv").open(newline="")))
    assert [bool(row["test_accuracy_last"]) for row in rows] == [True, False, True, False, True]
    [log] = (tmp_path / "log").glob("*/metrics.csv")
    assert "test_accuracy/honest" in log.read_text()
    assert "val_accuracy/liars" in log.read_text()


def test_without_a_liar_nothing_changes():
    assert_same(whole_state(run(METHOD, 2, callbacks=[Attack(liars=0)])), whole_state(run(METHOD, 2)))


def test_after_an_error_nobody_lies_any_more():
    """Lightning calls no teardown then: another fit would train on poisoned data, and leave the liars out."""

    class Breaks(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                raise RuntimeError("broken")

    data, federation, clean = Toy(), Federation(METHOD, tiny_encoder, seed=1), Toy()
    clean.setup()
    with pytest.raises(RuntimeError, match="broken"):
        quiet_trainer(1, FederatedLoop(), Attack("label_flip", [1, 3]), Breaks()).fit(federation, datamodule=data)
    assert federation.lying == frozenset()
    for client in range(CLIENTS):
        found, expected = (each.client_data(client).train.targets for each in (data, clean))
        assert torch.equal(found, expected)
