"""pFL-SSL: pFL-SimCLR against its restatement; what travels, and under which engines, for every objective."""

from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.methods import crossed
from _helpers.plain_calibre import PlainCalibre
from _helpers.resume import play
from _helpers.toy import CLIENTS, LABELS, SMALL_SIMCLR, assert_same, for_toy, run, whole_state
from _helpers.views import ToyViews, flat_encoder

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.client import Phase
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import PFLSSL, Calibre, FedEMA
from pfl_lightning.self_supervised import BYOL, MoCoV2, SimCLR, SimSiam, SMoG, SwAV

SMALL = {"hidden": 6, "out": 5}
COHORTS = [[0, 2, 3], [1, 2]]


def test_two_rounds_equal_the_restatement():
    data, fit = ToyViews(), partial(PFLSSL, objective=SMALL_SIMCLR, lr=0.05, epochs=2)
    federation = run(fit, 2, cohorts=COHORTS, data=data, encoder=flat_encoder, precision="64-true")
    plain = PlainCalibre(data, 2, 0.05, alpha_n=0.0, alpha_p=0.0, by_divergence=False)
    for round, cohort in enumerate(COHORTS):
        plain.play(round, cohort)
    sent = federation.server.broadcast(0, 2).weights
    got = {name.replace("objective.projector.layers", "projector"): tensor for name, tensor in sent.items()}
    assert_same(got, plain.shared(), atol=1e-7)


# Of each objective: what makes it, the parts of it that travel, and the parts that the client keeps.
CASES = {
    "simclr": (partial(SimCLR, **SMALL), {"projector"}, set()),
    "byol": (partial(BYOL, **SMALL), {"projector", "predictor"}, set()),
    "byol, target kept": (partial(BYOL, **SMALL, keep_target=True), {"projector", "predictor"}, {"target"}),
    "simsiam": (partial(SimSiam, **SMALL), {"projector", "predictor"}, set()),
    "mocov2": (partial(MoCoV2, **SMALL, bank=6), {"projector"}, set()),
    "swav": (partial(SwAV, **SMALL, prototypes=7), {"projector", "prototypes"}, set()),
    "smog": (partial(SMoG, **SMALL, groups=5), {"projector", "predictor"}, set()),
    "smog, groups shared": (
        partial(SMoG, **SMALL, groups=5, share_groups=True),
        {"projector", "predictor", "groups"},
        set(),
    ),
}
OBJECTIVE = pytest.mark.parametrize(("objective", "shared", "kept"), CASES.values(), ids=CASES)


def fit(objective, epochs=2):
    return partial(PFLSSL, objective=objective, lr=0.02, epochs=epochs)


def options():
    """Batches of four, and none of one sample: the heads have batch normalization."""
    return {"data": ToyViews(drop_last=True), "encoder": flat_encoder, "cohorts": COHORTS}


def break_client_0(inputs, targets):
    inputs[: len(LABELS[0])] = float("nan")


@OBJECTIVE
def test_a_client_whose_data_are_not_finite_is_left_out(objective, shared, kept):
    """Nothing of its target network, bank or groups reaches the client after it."""
    more = {"encoder": flat_encoder, "cohorts": [[0, 2, 3]]}
    with pytest.warns(UserWarning, match=r"left out of the aggregation: client 0, round 1: the (loss|projections)"):
        got = run(fit(objective), data=ToyViews(drop_last=True, change=break_client_0), **more)
    expected = run(fit(objective), data=ToyViews(drop_last=True), **more | {"cohorts": [[2, 3]]})
    sent = [dict(federation.server.broadcast(1, 1).weights) for federation in (got, expected)]
    assert_same(*sent)
    assert not got.personal.written(0)


@OBJECTIVE
def test_what_travels_and_what_stays(objective, shared, kept):
    loop = FederatedLoop(3)
    federation = run(fit(objective), data=ToyViews(drop_last=True), encoder=flat_encoder, loop=loop)
    sent = dict(federation.server.broadcast(0, 1).weights)
    assert {name.split(".")[1] for name in sent if name.startswith("objective.")} == shared
    assert {name.split(".")[0] for name in sent} == {"encoder", "objective"}
    stored = federation.personal.get(0)
    assert {name.split(".")[0] for name in stored} == ({"head", "objective"} if kept else {"head"})
    assert {name.split(".")[1] for name in stored if name.startswith("objective.")} == kept
    size = 3 * sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    assert loop.traffic.down == {"weights": size}
    assert loop.traffic.up == {"weights": size}


@OBJECTIVE
def test_a_target_starts_from_the_received_networks_or_from_the_clients_own(objective, shared, kept):
    """Client 0 is away for a round in which the global networks move."""
    seen = {}

    class Recorded(PFLSSL):
        def before_fit(self, context):
            super().before_fit(context)
            if context.client == 0 and hasattr(self.objective, "target"):
                copy = self.objective.target.copies[0]
                equal = torch.equal(copy[1].weight, self.encoder[1].weight)
                seen[context.round] = (equal, copy[1].weight.clone())

        def make_update(self, context, before):
            if context.client == 0 and hasattr(self.objective, "target"):
                seen[f"after {context.round}"] = self.objective.target.copies[0][1].weight.clone()
            return super().make_update(context, before)

    more = options() | {"cohorts": [[0, 1], [2], [0]]}
    run(partial(Recorded, objective=objective, lr=0.02, epochs=1), 3, **more)
    if seen:
        assert seen[0][0]
        assert not torch.equal(seen["after 0"], seen[0][1])
        assert seen[2][0] is not bool(kept)
        assert torch.equal(seen[2][1], seen["after 0"]) is bool(kept)
    assert bool(seen) == (objective.func in (BYOL, MoCoV2, SMoG))


ENGINES = {
    "TrainerEngine": (lambda patch: TrainerEngine(), 0.0),
    "RayEngine": (lambda patch: fake_ray_engine(patch, 2)[0], 0.0),
    "VectorizedEngine": (lambda patch: VectorizedEngine(forward="vmap"), 1e-8),
}


OFTEN = crossed(
    CASES, ENGINES, lambda case, engine: case == "simclr" or engine in ("TrainerEngine", "VectorizedEngine")
)


@pytest.mark.repeated
@pytest.mark.parametrize(("objective", "shared", "kept", "make", "atol"), OFTEN)
def test_engines_agree(objective, shared, kept, make, atol, monkeypatch):
    more = {"precision": "64-true"}
    got = run(fit(objective), 2, engine=make(monkeypatch), **options(), **more)
    expected = run(fit(objective), 2, engine=SequentialEngine(), **options(), **more)
    assert_same(whole_state(got), whole_state(expected), atol=atol)


@OBJECTIVE
def test_every_objective_is_vectorized(objective, shared, kept):
    engine = VectorizedEngine(forward="vmap")
    run(fit(objective, epochs=1), 2, engine=engine, **options())
    assert engine._warned == set()
    assert not engine.groups.reasons


@pytest.mark.repeated
@OBJECTIVE
def test_stop_and_resume_is_exact(tmp_path, objective, shared, kept):
    more = {"encoder": flat_encoder, "cohort": 3}
    whole = play(tmp_path / "whole", 3, fit(objective, 1), data=ToyViews(drop_last=True), **more)
    play(tmp_path / "parts", 1, fit(objective, 1), data=ToyViews(drop_last=True), **more)
    torch.manual_seed(5)
    path = str(tmp_path / "parts" / "last.ckpt")
    resumed = play(tmp_path / "parts", 3, fit(objective, 1), data=ToyViews(drop_last=True), ckpt_path=path, **more)
    assert_same(whole_state(resumed), whole_state(whole))


HALVES = {
    f"{name} {precision}": (method, precision)
    for name, method in {"PFLSSL": PFLSSL, "Calibre": partial(Calibre, clusters=3)}.items()
    for precision in ("bf16-mixed", "bf16-true")
}
HALF_OFTEN = crossed(CASES, HALVES, lambda case, half: case == "simclr" or half == "PFLSSL bf16-mixed")


@pytest.mark.parametrize(("objective", "shared", "kept", "method", "precision"), HALF_OFTEN)
def test_in_half_precision(objective, shared, kept, method, precision):
    federation = run(partial(method, objective=objective, lr=0.02, epochs=1), 2, precision=precision, **options())
    assert all(tensor.isfinite().all() for tensor in whole_state(federation).values())
    assert float(federation.trainer.callback_metrics["train/clients_left_out"]) == 0


def test_the_encoder_and_the_objective_train_and_the_head_does_not():
    client = PFLSSL(flat_encoder(()), 5, objective=SMALL_SIMCLR, epochs=3)
    assert client.phases() == (Phase("self_supervised", ("encoder.*", "objective.*"), 3),)
    federation = run(fit(SMALL_SIMCLR), data=ToyViews(), encoder=flat_encoder)
    heads = [federation.client_model(k).head.weight for k in range(CLIENTS)]
    assert all(torch.equal(head, heads[0]) for head in heads)


TOO_FEW = {
    "mocov2": (partial(MoCoV2, **SMALL, bank=8), r"bank of 8 keys is larger than the 7 training samples of client 4"),
    "smog": (partial(SMoG, **SMALL, groups=8), r"SMoG looks for 8 groups in the 7 training samples of client 4"),
}


@pytest.mark.parametrize(("objective", "message"), TOO_FEW.values(), ids=TOO_FEW)
@pytest.mark.parametrize("method", [PFLSSL, Calibre, FedEMA], ids=lambda method: method.__name__)
def test_too_few_samples_are_refused_before_the_first_round(method, objective, message):
    """And not when the turn of the client comes, which may be late or never."""
    fitted = []

    class Watched(method):
        def before_fit(self, context):
            fitted.append(context.client)
            return super().before_fit(context)

    with pytest.raises(ConfigurationError, match=message):
        run(partial(Watched, objective=objective), data=ToyViews(), encoder=flat_encoder, cohorts=[[1, 2]])
    assert fitted == []


def test_novel_clients_may_have_fewer_samples():
    data = ToyViews(novel_clients=4, drop_last=True)
    [trains] = data.participating
    bank = len(LABELS[trains])
    assert bank > min(map(len, LABELS))
    federation = run(fit(partial(MoCoV2, **SMALL, bank=bank), 1), data=data, encoder=flat_encoder, loop=FederatedLoop())
    assert federation.personal.written(trains)


def test_one_sample_in_a_projector_with_batch_normalization():
    """SMoG's predictor sees one view; the other heads see two views of the one sample."""
    message = r"client 1, round 1: batch normalization cannot train on a batch of one item.*drop_last to true"
    with pytest.raises(ConfigurationError, match=message):
        run(fit(CASES["smog"][0]), data=ToyViews(), encoder=flat_encoder)


def test_equal_views_are_warned_of():
    data = ToyViews()
    data.augment = False
    with pytest.warns(UserWarning, match="PFLSSL compares 2 augmented views of each sample"):
        run(fit(SMALL_SIMCLR), data=data, encoder=flat_encoder)


@pytest.mark.parametrize("method", [PFLSSL, Calibre, FedEMA], ids=lambda method: method.__name__)
def test_several_encoders_are_refused(method):
    """What travels is the encoder."""
    with pytest.raises(
        ConfigurationError, match=rf"{method.__name__} needs the same shapes.*use one encoder for all clients"
    ):
        run(for_toy(method), data=ToyViews(), encoder=[flat_encoder, wide_encoder])


def wide_encoder(input_shape):
    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 4))
    encoder.out_features = 4
    return encoder


@pytest.mark.parametrize("other", ["byol", "simsiam", "byol, target kept"])
def test_a_checkpoint_of_another_objective_is_refused(tmp_path, other):
    more = {"encoder": flat_encoder, "cohort": 3}
    play(tmp_path, 1, fit(CASES["simclr"][0], 1), data=ToyViews(drop_last=True), **more)
    with pytest.raises(CheckpointError, match=r"other options of the method: .*models.0.objective"):
        play(
            tmp_path,
            2,
            fit(CASES[other][0], 1),
            data=ToyViews(drop_last=True),
            ckpt_path=str(tmp_path / "last.ckpt"),
            **more,
        )
