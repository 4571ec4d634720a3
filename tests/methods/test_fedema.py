"""FedEMA against a restatement in plain torch: every client's own networks, the mixture, BYOL, SGD, averaging."""

import copy
import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from _helpers.plain import mean_of
from _helpers.plain_objectives import PlainBYOL
from _helpers.resume import play
from _helpers.toy import CLASSES, CLIENTS, FEATURES, SEED, SMALL_BYOL, SMALL_SIMCLR, assert_same, run, whole_state
from _helpers.views import ToyViews, flat_encoder, pairs_of_views
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedEMA
from pfl_lightning.seeding import derive_seed
from pfl_lightning.self_supervised import BYOL

EPOCHS, LR = 2, 0.05
COHORTS = [[0, 2, 3], [1, 2], [0, 2], [2, 3]]  # client 4 never takes part
FIT = partial(FedEMA, objective=SMALL_BYOL, lr=LR, epochs=EPOCHS, weight_decay=1e-3)


def two_layers(width):
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 5))


class Parts(nn.Module):
    """Encoder, head, projector and predictor, drawn in this order."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = flat_encoder(()), nn.Linear(FEATURES, CLASSES)
        self.projector, self.predictor = two_layers(FEATURES), two_layers(5)


@dataclass
class Restated:
    """Clients and server."""

    data: ToyViews
    tau: float = 0.7
    scaler: float | None = None
    consecutive: bool = False
    keep_target: bool = True
    update_encoder: str = "dynamic"
    update_predictor: str = "dynamic"
    update_target: str = "own"
    aggregate_encoder: str = "online"
    encoder_weight: float = 0.0
    predictor_weight: float = 0.0
    threshold: float = 0.4
    lr_schedule: str = "constant"
    own: dict = field(default_factory=dict)
    scalers: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)
    mus: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(derive_seed(SEED, "initial weights"))
        parts = Parts().double()
        self.server = PlainBYOL(parts.encoder, parts)
        self.server.momentum = 0.99

    def play(self, round, cohort):
        states = []
        for client in cohort:
            self.own[client] = self.fit(client, round)
            own = self.own[client]
            sent = {n: t.detach().clone() for n, t in own.named().items()}
            if self.aggregate_encoder == "target":
                for part, net in zip(("encoder", "projector"), (own.target_encoder, own.target_projector), strict=True):
                    sent |= {f"{part}.{n}": t.detach().clone() for n, t in net.named_parameters()}
            states.append(sent)
        mean = mean_of(states, [len(self.data.labels[client]) for client in cohort])
        for name, tensor in self.server.named().items():
            tensor.detach().copy_(mean[name])

    def start(self, client, round):
        """The networks that a fit starts from, with their target."""
        net = copy.deepcopy(self.server)
        net.target_encoder, net.target_projector = copy.deepcopy(net.encoder), copy.deepcopy(net.projector)
        known = client in self.own and (not self.consecutive or self.last[client] == round - 1)
        self.last[client] = round
        if not known:
            return net
        own = self.own[client]
        pairs = list(zip(net.encoder.parameters(), own.encoder.parameters(), strict=True))
        distance = sum((g - k).square().sum() for g, k in pairs).sqrt().item()
        if client not in self.scalers:
            self.scalers[client] = self.tau / distance if self.scaler is None else self.scaler
        mu = min(self.scalers[client] * distance, 1.0)
        self.mus.append(mu)
        received = copy.deepcopy(net)
        shares = {"dynamic": mu, "global": 0.0, "own": 1.0, "threshold": 1.0 if distance >= self.threshold else 0.0}
        with torch.no_grad():
            for name, g in net.named().items():
                fixed = self.predictor_weight if name.startswith("predictor") else self.encoder_weight
                kind = self.update_predictor if name.startswith("predictor") else self.update_encoder
                share = {**shares, "fixed": fixed}[kind]
                g.copy_(share * own.named()[name] + (1 - share) * g)
        if self.update_target == "global":
            net.target_encoder, net.target_projector = received.encoder, received.projector
        elif self.keep_target:
            net.target_encoder, net.target_projector = own.target_encoder, own.target_projector
        else:
            net.target_encoder, net.target_projector = copy.deepcopy(net.encoder), copy.deepcopy(net.projector)
        return net

    def rate(self, round):
        return LR * (1 + math.cos(math.pi * round / len(COHORTS))) / 2 if self.lr_schedule == "cosine" else LR

    def fit(self, client, round):
        net = self.start(client, round)
        velocity = [torch.zeros_like(p) for p in net.parameters()]
        for first, second in pairs_of_views(self.data, client, round, EPOCHS):
            gradients = torch.autograd.grad(net.loss(first, second), net.parameters())
            with torch.no_grad():
                for p, g, v in zip(net.parameters(), gradients, velocity, strict=True):
                    v.mul_(0.9).add_(g + 1e-3 * p)
                    p.sub_(self.rate(round) * v)
        return net


def plain_names(state):
    """Names without the places of the objective and of lightly's heads."""
    return {name.replace("objective.", "").replace("tor.layers.", "tor."): tensor for name, tensor in state.items()}


OPTIONS = {
    "autoscaler": {},
    "cosine": {"lr_schedule": "cosine"},
    "tau": {"tau": 0.3},
    "a scaler for all": {"scaler": 0.8},
    "a large scaler": {"scaler": 1e6},
    "consecutive": {"consecutive": True},
    "target not kept": {"keep_target": False},
    "own encoder, global target": {"update_encoder": "own", "update_target": "global", "update_predictor": "global"},
    "FedU": {"update_encoder": "global", "update_predictor": "threshold", "threshold": 0.2},
    "fixed": {
        "update_encoder": "fixed",
        "encoder_weight": 0.3,
        "update_predictor": "fixed",
        "predictor_weight": 0.6,
        "aggregate_encoder": "target",
    },
    "all of the target": {"aggregate_encoder": "target", "update_target": "global", "update_predictor": "own"},
}


def play_both(options, cohorts=COHORTS):
    method = {key: value for key, value in options.items() if key != "keep_target"}
    objective = partial(SMALL_BYOL, keep_target=options.get("keep_target", True))
    data, plain = ToyViews(), Restated(ToyViews(), **options)
    fit = partial(FIT, objective=objective, **method)
    federation = run(fit, len(cohorts), cohorts=cohorts, data=data, encoder=flat_encoder, precision="64-true")
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    return federation, plain


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_four_rounds_equal_the_restatement(options):
    federation, plain = play_both(options)
    sent = plain_names(federation.server.broadcast(0, 9).weights)
    assert_same(sent, {n: t.detach() for n, t in plain.server.named().items()}, atol=1e-8)
    for client in range(CLIENTS):
        stored = federation.personal.get(client)
        own = plain_names({n[4:].replace("/", "."): t for n, t in stored.items() if n.startswith("own.")})
        expected = plain.own.get(client)
        if expected is None:
            assert int(stored["last_round"]) == -1
            continue
        assert_same(own, {n: t.detach() for n, t in expected.named().items()}, atol=1e-8)
        for part, net in enumerate(expected.target() if options.get("keep_target", True) else ()):
            place = f"objective.target.copies.{part}." + ("layers." if part else "")
            kept = {n.removeprefix(place): t for n, t in stored.items() if n.startswith(place)}
            assert_same(kept, dict(net), atol=1e-8)


@pytest.mark.slow
def test_the_options_mix_as_they_say():
    """What the restatement, and so the method, has mixed in its five fits that were not a client's first."""
    mus = {name: play_both(options)[1].mus for name, options in OPTIONS.items()}
    assert mus["autoscaler"][0] == pytest.approx(0.7)
    assert mus["tau"][0] == pytest.approx(0.3)
    assert mus["a large scaler"] == [1.0] * 5
    assert len(mus["autoscaler"]) == 5
    assert len(mus["consecutive"]) == 3  # clients 0 and 3 were away in between
    assert 0 < min(mus["a scaler for all"]) < max(mus["a scaler for all"]) < 1


def test_mu():
    client = FIT(flat_encoder(()), 5)
    assert client._mu(0.0) == 0.0  # alone in a cohort: own and global networks are the same
    assert float(client.first_divergence) == 0
    assert client._mu(2.0) == pytest.approx(0.7)
    assert client._mu(1.0) == pytest.approx(0.35)
    assert client._mu(9.0) == 1.0


def test_what_travels_and_what_stays():
    federation = run(FIT, data=ToyViews(), encoder=flat_encoder, cohorts=[[0, 1]])
    sent = federation.server.broadcast(0, 1).weights
    assert {".".join(name.split(".")[:2]) for name in sent if not name.startswith("encoder")} == {
        "objective.projector",
        "objective.predictor",
    }
    stored = federation.personal.get(0)
    assert {name.split(".")[0] for name in stored} == {"head", "objective", "own", "last_round", "first_divergence"}
    assert len([name for name in stored if name.startswith("own.")]) == len(sent)  # no normalization here


def test_evaluated_is_the_global_encoder():
    federation = run(FIT, 2, data=ToyViews(), encoder=flat_encoder, cohorts=COHORTS)
    sent = federation.server.broadcast(0, 2).weights
    for client in range(CLIENTS):
        encoder = federation.client_model(client).encoder.state_dict()
        assert_same(dict(encoder), {n[8:]: t for n, t in sent.items() if n.startswith("encoder.")})


def test_stop_and_resume_is_exact(tmp_path):
    options = {"encoder": flat_encoder, "cohort": 3}
    whole = play(tmp_path / "whole", 4, FIT, data=ToyViews(), **options)
    play(tmp_path / "parts", 2, FIT, data=ToyViews(), **options)
    torch.manual_seed(5)
    path = str(tmp_path / "parts" / "last.ckpt")
    resumed = play(tmp_path / "parts", 4, FIT, data=ToyViews(), ckpt_path=path, **options)
    assert_same(whole_state(resumed), whole_state(whole))


def test_by_default_it_is_byol_with_a_target_of_the_clients_own():
    client = FedEMA(flat_encoder(()), 5)
    assert type(client.objective) is BYOL
    assert client.objective.target.keep
    assert client.objective.squared_distances  # the loss that the learning rate was published with
    assert client.lr == 0.032
    assert client.objective.target.momentum == 0.99
    assert (client.tau, client.scaler) == (0.7, None)
    assert client.phases() == (Phase("self_supervised", ("encoder.*", "objective.*"), 5),)


def test_another_objective():
    fit = partial(FedEMA, objective=SMALL_SIMCLR, lr=LR, epochs=1)
    federation = run(fit, 2, data=ToyViews(), encoder=flat_encoder, cohorts=COHORTS)
    assert all(tensor.isfinite().all() for tensor in whole_state(federation).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1.5}, "tau must be between 0 and 1"),
        ({"tau": -0.1}, "tau must be between 0 and 1"),
        ({"encoder_weight": 1.5}, "encoder_weight must be between 0 and 1"),
        ({"update_encoder": "ema"}, "update_encoder must be one of"),
        ({"update_predictor": "dapu"}, "update_predictor must be one of"),
        ({"scaler": -1.0}, r"scaler \(lambda\) must be a finite number of at least 0"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FIT(flat_encoder(()), 5, **options)


def test_what_needs_a_target_network_or_convolutions_is_refused():
    for options, message in (
        (
            {"aggregate_encoder": "target", "objective": SMALL_SIMCLR},
            "aggregate_encoder='target': SimCLR has no target",
        ),
        (
            {"update_target": "global", "objective": partial(SMALL_BYOL, keep_target=False)},
            "update_target='global' needs a target network that stays on the client, and BYOL keeps none",
        ),
        ({"divergence": "published"}, "is measured on convolutions, and the encoder has none"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            FIT(flat_encoder(()), 5, **options)


def convolved(input_shape):
    """One convolution of one pixel, and a layer."""
    encoder = nn.Sequential(nn.Conv2d(6, 5, 1), nn.Tanh(), nn.Flatten(), nn.Linear(5, FEATURES))
    encoder.out_features = FEATURES
    return encoder


def test_the_published_divergence_is_how_far_the_convolutions_went():
    fit = partial(FIT, divergence="published", tau=0.6, epochs=1)
    options = {"data": ToyViews(), "encoder": convolved, "precision": "64-true"}
    one = run(fit, 1, cohorts=[[0, 2]], **options)
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    start = convolved(())[0].weight.detach().double()
    moved = {client: one.personal.get(client)["last_movement"] for client in (0, 2)}
    for client, movement in moved.items():
        went = one.personal.get(client)["own.encoder/0/weight"] - start
        torch.testing.assert_close(movement, went.norm())
    two = run(fit, 2, cohorts=[[0, 2]], **options)
    for client, movement in moved.items():  # lambda_k = tau / the first movement, so that mu was tau
        torch.testing.assert_close(two.personal.get(client)["first_divergence"], movement)
        assert not torch.equal(two.personal.get(client)["last_movement"], movement)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_the_cosine_is_of_the_optimizers_own_rate(engine):
    """Whoever sets it: the rate of another optimizer is not that of ``lr``."""
    options = {"objective": SMALL_BYOL, "lr_schedule": "cosine", "epochs": 1, "momentum": 0.0, "weight_decay": 0.0}
    first, other = (
        run(
            partial(FedEMA, **options, **given),
            2,
            cohorts=COHORTS,
            data=ToyViews(),
            encoder=flat_encoder,
            engine=engine(),
        )
        for given in ({"lr": LR}, {"lr": 0.7, "optimizer": partial(torch.optim.SGD, lr=LR)})
    )
    assert_same(whole_state(first), whole_state(other), atol=0.0)
