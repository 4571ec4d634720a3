"""One client that sends numbers far beyond those of the others, once: it is left out, and the run is sound."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.process_helpers import forked_process_engine
from _helpers.toy import GivenCohorts, Toy, assert_same, for_toy, normed_encoder, run, whole_state
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import FederatedLoop, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError, InvalidMessageError
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.methods import SCAFFOLD, Calibre, DualFed, FedAvg, FedPAC, FedProto, LocalOnly
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.update_norms import UpdateGuard

SIX = ([0] * 6 + [1] * 5, [1] * 7 + [2] * 6, [0] * 4 + [2] * 5 + [3] * 5, [3] * 6 + [4] * 9, [0] * 3 + [1] * 4, [4] * 8)
EVERYBODY = list(range(6))


def moved(value):
    """Every number of an update, moved by a value."""
    return lambda update: update.with_tensors(lambda t: t + value if t.is_floating_point() else t)


def lying(method, change, bad=(2,), round=0):
    """The method, of which some clients change their update in one round."""

    class Lying(method):
        def make_update(self, context, before):
            update = super().make_update(context, before)
            return change(update) if context.client in bad and context.round == round else update

    return Lying


def play(method, rounds=3, cohorts=(EVERYBODY,), ratio=1000.0, labels=SIX, **options):
    """The final state, and what was said of clients that were left out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = GivenCohorts(*cohorts, max_update_ratio=ratio)
        federation = run(method, rounds, loop=loop, data=Toy(labels), limit_val_batches=0, **options)
    said = [
        str(w.message) for w in caught if any(word in str(w.message) for word in ("left out", "undone", "diverges"))
    ]
    return federation, said


def without(bad, round, rounds=3):
    return [[k for k in EVERYBODY if k != bad] if r == round else EVERYBODY for r in range(rounds)]


@pytest.mark.repeated
@pytest.mark.parametrize("method", [FedAvg, FedPAC, FedProto, SCAFFOLD, Calibre, DualFed], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("value", "bad", "round"),
    [(1e6, 0, 0), (1e6, 5, 1), (1e11, 2, 0), (1e11, 0, 1), (1e30, 1, 0), (1e30, 5, 2), (-1e6, 5, 0), (-1e6, 3, 2)],
)
def test_one_client_that_is_far_off_is_left_out_wherever_it_stands(method, value, bad, round):
    method = for_toy(method, epochs=1)
    got, said = play(partial(lying(method.func, moved(value), [bad], round), **method.keywords))
    expected, nothing = play(method, cohorts=without(bad, round))
    assert_same(whole_state(got), whole_state(expected))
    assert nothing == []
    assert ["left out" in line and f"client {bad}, round {round + 1}: " in line for line in said] == [True], said


def test_it_is_named_with_its_distance_the_median_and_the_remedy():
    _, said = play(partial(lying(FedAvg, moved(1e6), [4], 1), epochs=1))
    assert len(said) == 1
    beginning = (
        "left out of the aggregation: client 4, round 2: the change of weights.encoder.0.weight has a norm of 5.48e+06"
    )
    assert said[0].startswith(f"{beginning}, more than 1000 times the median of the updates, 0.0")
    assert "look at this client's data" in said[0]
    assert "FederatedLoop(max_update_ratio=None) accepts such updates" in said[0]


def test_statistics_without_a_counterpart_are_compared_by_their_norms():
    """Client 4 has two classes, and what was sent to it has three."""
    _, said = play(for_toy(lying(FedProto, moved(1e4), [4], 1), epochs=1), cohorts=[EVERYBODY])
    assert (
        "client 4, round 2: means has a norm of 2.83e+04, more than 1000 times the median of the updates, " in said[0]
    )


def test_a_server_that_takes_nothing_is_not_led_astray():
    def change(update):
        return replace(update, weights={"head.bias": torch.full((5,), 1e11)})

    got, said = play(partial(lying(LocalOnly, change, [2], 1), epochs=1))
    expected, _ = play(partial(LocalOnly, epochs=1), cohorts=without(2, 1))
    assert_same(whole_state(got), whole_state(expected))
    assert "client 2, round 2: " in said[0]


@pytest.mark.repeated
@pytest.mark.parametrize(
    "make",
    [
        lambda patch: TrainerEngine(),
        lambda patch: VectorizedEngine(forward="vmap"),
        lambda patch: fake_ray_engine(patch, 2)[0],
        lambda patch: forked_process_engine(patch, 2),
    ],
    ids=["trainer", "vmap", "ray", "processes"],
)
@pytest.mark.parametrize("method", [FedAvg, FedPAC], ids=lambda m: m.__name__)
def test_every_engine_leaves_it_out(method, make, monkeypatch):
    got, said = play(partial(lying(method, moved(1e6), [1]), epochs=1), engine=make(monkeypatch))
    expected, _ = play(partial(method, epochs=1), cohorts=without(1, 0), engine=make(monkeypatch))
    assert_same(whole_state(got), whole_state(expected), atol=1e-6)
    assert ["client 1, round 1: " in line for line in said] == [True], said


def test_of_two_clients_the_farther_one_is_left_out():
    for cohort in ([1, 4], [4, 1]):
        got, said = play(partial(lying(FedAvg, moved(1e6), [4]), epochs=1), 1, [cohort])
        expected, _ = play(partial(FedAvg, epochs=1), 1, [[1]])
        assert_same(whole_state(got), whole_state(expected))
        assert "client 4, round 1: " in said[0]


def test_a_cohort_of_one_is_compared_with_the_last_round():
    method = partial(lying(FedAvg, moved(1e6), [4], 1), epochs=1)
    _, said = play(method, 2, [EVERYBODY, [4, 0]])
    assert "client 4, round 2: " in said[0]


def test_it_can_be_turned_off():
    federation, said = play(partial(lying(FedAvg, moved(1e6)), epochs=1), 1, ratio=None)
    assert float(next(federation.server.buffers()).abs().max()) > 1e5
    assert not [line for line in said if "left out" in line]
    for ratio in (0.5, 0, float("nan"), float("inf"), "much", True):
        with pytest.raises(ConfigurationError, match="max_update_ratio must be a finite number of at least 1"):
            FederatedLoop(max_update_ratio=ratio)


# ---------------------------------------------------------------------- order, memory, resume


def test_updates_are_received_in_the_order_of_the_cohort_and_wait_for_two_others_at_most(monkeypatch):
    seen, check, receive = [], AveragingAggregator.check, AveragingAggregator.receive
    patch = partial(monkeypatch.setattr, AveragingAggregator)
    patch("check", lambda server, update: seen.append(f"check {update.client}") or check(server, update))
    patch("receive", lambda server, update: seen.append(f"receive {update.client}") or receive(server, update))
    play(partial(FedAvg, epochs=1), 2, [[4, 1, 5, 0], [2, 3]])
    first = ["check 4", "check 1", "check 5", "receive 4", "receive 1", "receive 5", "check 0", "receive 0"]
    assert seen == [*first, "check 2", "receive 2", "check 3", "receive 3"]


def test_a_resumed_run_compares_with_the_same_norms(tmp_path):
    """Two of three lie: without those of the round before, theirs would be the median."""
    method, cohorts = partial(lying(FedPAC, moved(1e6), [0, 1], 2), epochs=1), [EVERYBODY, EVERYBODY, [0, 1, 2]]
    whole, said = play(method, 3, cohorts)
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    play(method, 2, cohorts, callbacks=[keep], enable_checkpointing=True)
    resumed, again = play(method, 3, cohorts, ckpt_path=str(tmp_path / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    assert said == again
    assert len(said) == 2
    kept = [federation.trainer.callbacks[0].state_dict()["updates"] for federation in (whole, resumed)]
    assert kept[0] == kept[1]
    assert {len(norms) for norms in kept[0].values()} == {1}


# ---------------------------------------------------------------------- federations of unlike clients


def assert_unaffected(method, **options):
    got, said = play(method, **options)
    expected, _ = play(method, ratio=None, **options)
    assert_same(whole_state(got), whole_state(expected))
    assert not [line for line in said if "left out" in line]


@pytest.mark.parametrize("order", [1, -1])
def test_one_step_beside_five_hundred(order):
    labels = [[0, 1], [0, 1] * 1000, [2], [3], [4], [1]][::order]
    assert_unaffected(partial(FedAvg, lr=0.05, momentum=0.9, epochs=1), rounds=2, labels=labels)


@pytest.mark.parametrize("large", [[0], [5], [1, 2], [0, 1, 2, 3, 4]])
def test_prototypes_of_many_scales(large):
    class Scaled(FedProto):
        def make_update(self, context, before):
            update = super().make_update(context, before)
            factor = 1e2 if context.client in large else 1e-3
            return update.with_tensors(lambda t: t * factor if t.is_floating_point() else t)

    assert_unaffected(partial(Scaled, epochs=1))


@pytest.mark.parametrize("still", [[0, 1, 2, 3, 4], [1, 3]])
def test_updates_that_change_nothing(still):
    class Still(FedAvg):
        def before_fit(self, context):
            return {name: tensor.clone() for name, tensor in self.state_dict().items()}

        def make_update(self, context, before):
            if context.client in still:
                self.load_state_dict(before)
            return super().make_update(context, before)

    assert_unaffected(partial(Still, epochs=1))


def test_where_most_have_converged_the_one_that_has_not_is_taken():
    class Settled(FedAvg):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-1 if self.late else 1e-8)

        def before_fit(self, context):
            self.late = context.client == 5
            return super().before_fit(context)

    assert_unaffected(partial(Settled, epochs=1))


def masked_encoder(shape):
    """With a mask as an attention has, which is part of its state."""
    encoder = normed_encoder(shape)
    encoder.register_buffer("mask", torch.tensor([0.0, -3e38, torch.finfo(torch.float32).min]))
    return encoder


def test_masks_come_back_and_hide_nothing():
    labels = [[0, 1] * 4, [1, 2] * 4, [0, 3] * 6, [3, 4] * 4, [0, 1] * 2, [4] * 8]
    assert_unaffected(partial(FedAvg, epochs=1), encoder=masked_encoder, labels=labels)
    change = moved(1e6)

    def keeps_mask(update):
        weights = {n: t if n == "encoder.mask" else change(update).weights[n] for n, t in update.weights.items()}
        return replace(update, weights=weights)

    _, said = play(partial(lying(FedAvg, keeps_mask), epochs=1), encoder=masked_encoder, labels=labels)
    assert ["client 2, round 1: " in line for line in said] == [True], said


# ---------------------------------------------------------------------- the guard by itself


def message(norm, sent=0.0):
    """An update at some distance from its broadcast, and the broadcast, of some norm."""
    own = torch.zeros(3, dtype=torch.float64)
    own[1] = sent
    moved = own.clone()
    moved[0] = norm
    update = ClientUpdate(client=0, round=0, num_samples=1, weights={"w": moved})
    return update, Broadcast(client=0, round=0, weights={"w": own})


def judged(guard, distances, sent=0.0):
    """Places of the updates of a round that are left out; all are judged as a round does."""
    found, waiting = [], []

    def judge():
        for place, (update, broadcast, norms) in waiting:
            try:
                guard.check(update, broadcast, norms)
            except InvalidMessageError:
                guard.remove(norms)
                found.append(place)
        waiting.clear()

    for place, distance in enumerate(distances):
        update, broadcast = message(distance, sent)
        norms, enough = guard.norms(update, broadcast)
        waiting.append((place, (update, broadcast, norms)))
        if enough:
            judge()
    judge()
    guard.end_round(accepted=True)
    return found


SOUND = st.lists(st.floats(1.0, 999.0), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.lists(SOUND, min_size=1, max_size=4), st.floats(1e-9, 1e6))
def test_updates_within_the_ratio_are_never_left_out(rounds, scale):
    guard = UpdateGuard()
    for distances in rounds:
        assert judged(guard, [scale * one for one in distances]) == []


@settings(max_examples=60, deadline=None)
@given(SOUND, SOUND.filter(lambda found: len(found) > 1), st.data(), st.floats(1.01, 1e5))
def test_one_beyond_the_ratio_is_always_left_out(before, now, data, factor):
    guard, place = UpdateGuard(), data.draw(st.integers(0, len(now)))
    if data.draw(st.booleans()):
        judged(guard, before)
    assert judged(guard, [*now[:place], factor * 1e3 * 999.0, *now[place:]]) == [place]


def test_a_distance_up_to_the_norm_of_what_was_sent_harms_nobody():
    assert judged(UpdateGuard(), [1e-6, 1e-6, 2e-6, 0.5], sent=1.0) == []
    assert judged(UpdateGuard(), [1e-6, 1e-6, 2e-6, 1.5], sent=1.0) == [3]
    assert judged(UpdateGuard(), [0.0, 0.0, 0.0, 1e11]) == []


def test_an_undone_round_does_not_count():
    guard = UpdateGuard()
    judged(guard, [1.0, 2.0, 3.0])
    before = guard.state_dict()
    update, broadcast = message(1e9)
    guard.norms(update, broadcast)
    guard.end_round(accepted=False)
    assert guard.state_dict() == before == {"weights.w": [1.0, 2.0, 3.0]}
    assert judged(guard, [1e9]) == [0]
