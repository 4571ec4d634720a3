"""SCAFFOLD against plain torch, and what its control variates add up to."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put
from _helpers.toy import BATCH, CLIENTS, LABELS, Toy, assert_same, normed_encoder, run, tiny_encoder
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from pfl_lightning import SequentialEngine
from pfl_lightning.client import Phase
from pfl_lightning.errors import ConfigurationError, InvalidMessageError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import SCAFFOLD, FedAvg
from pfl_lightning.methods._gradients import full_gradient, steps_in_gradients

LR, EPOCHS, MOMENTUM, DECAY = 0.05, 2, 0.5, 5e-4
COHORTS = [[0, 2, 3], [1, 2], [0, 2]]  # client 4 never takes part
METHOD = partial(SCAFFOLD, lr=LR, epochs=EPOCHS)


def zeros(net):
    return {name: torch.zeros_like(p) for name, p in net.named_parameters()}


def local_steps(net, steps, correction, momentum):
    """SGD along g(y) + c - c_i, written out; the mean of g(y) with weight decay, each as often as it acts."""
    velocity, total, acts = zeros(net), zeros(net), 0.0
    for j, (inputs, labels) in enumerate(steps):
        share = sum(momentum**later for later in range(len(steps) - j))
        gradients = torch.autograd.grad(cross_entropy(net, inputs, labels), list(net.parameters()))
        acts += share
        with torch.no_grad():
            for (name, p), g in zip(net.named_parameters(), gradients, strict=True):
                raw = g + DECAY * p
                total[name] += share * raw
                velocity[name].mul_(momentum).add_(raw + correction[name])
                p.sub_(LR * velocity[name])
    return {name: value / acts for name, value in total.items()}


def restate(data, *, control="steps", momentum=MOMENTUM, step=1.0):
    """Global model, c and every c_i after the rounds; the new c_i is the mean of the gradients as they were taken."""
    net = first_net().double()
    c, own = zeros(net), [zeros(net) for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        trained, changes, sent = [], [], named(net)
        for client in cohort:
            local = copy_of(net)
            steps = [[inputs.double(), labels] for inputs, labels in batches(data, client, round, "fit/0", EPOCHS)]
            correction = {name: c[name] - own[client][name] for name in c}
            new = local_steps(local, steps, correction, momentum)
            if control == "gradient":
                inputs, labels = data.tensors(client)
                loss = F.cross_entropy(net(inputs.double()), labels)
                new = dict(zip(c, torch.autograd.grad(loss, list(net.parameters())), strict=True))
            changes.append({name: new[name] - own[client][name] for name in c})
            own[client] = new
            trained.append(named(local))
        mean = mean_of(trained, [1] * len(cohort))
        put(net, {name: sent[name] + step * (mean[name] - sent[name]) for name in mean})
        c = {name: c[name] + sum(change[name] for change in changes) / CLIENTS for name in c}
    return named(net), c, own


def stored_control(federation, client):
    stored = federation.personal.get(client)
    return {n.removeprefix("own_control.").replace("/", "."): t for n, t in stored.items() if "own_control." in n}


CASES = {
    "default": {},
    "no momentum": {"momentum": 0.0},
    "large momentum": {"momentum": 0.9},
    "a step of the server": {"step": 0.5},
    "gradient": {"control": "gradient"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_three_rounds_equal_the_restatement(case):
    """c_i is exactly the mean of the batch gradients, without the corrections in them, whatever the momentum."""
    data = Toy()
    options = {"server_lr" if name == "step" else name: value for name, value in case.items()}
    federation = run(
        partial(METHOD, **options), 3, cohorts=COHORTS, data=data, precision="64-true", limit_val_batches=0
    )
    net, c, own = restate(data, **case)
    assert_same(named(federation.client_model(1), "encoder") | named(federation.client_model(1), "head"), net, 1e-9)
    assert_same(federation.server.control.as_state(), c, 1e-9)
    for client in range(CLIENTS):
        assert_same(stored_control(federation, client), own[client], 1e-9)


def test_steps_in_gradients():
    for momentum in (0.0, 0.5, 0.9):
        for steps in (1, 2, 7):
            slow = sum((1 - momentum ** (steps - j + 1)) / (1 - momentum) for j in range(1, steps + 1))
            assert steps_in_gradients(steps, momentum) == pytest.approx(slow, rel=1e-12)


def test_a_federation_of_one_client_is_fedavg():
    data = partial(Toy, LABELS[:1])
    one = run(METHOD, 3, cohorts=[[0]], data=data())
    other = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 3, cohorts=[[0]], data=data())
    assert_same(one.server.weights.as_state(), other.server.weights.as_state(), 1e-6)


def test_the_first_round_is_fedavg_with_a_plain_mean():
    class PlainMean(FedAvg):
        def configure_aggregator(self, num_clients):
            server = super().configure_aggregator(num_clients)
            server.by_samples = False
            return server

    one = run(METHOD, 1, cohorts=COHORTS)
    other = run(partial(PlainMean, lr=LR, epochs=EPOCHS), 1, cohorts=COHORTS)
    assert_same(one.server.weights.as_state(), other.server.weights.as_state())


def mean_control(federation, clients):
    stored = [stored_control(federation, client) for client in clients]
    return {name: sum(own[name] for own in stored) / len(stored) for name in stored[0]}


def test_c_is_the_mean_of_the_clients_variates():
    federation = run(METHOD, 3, cohorts=COHORTS)
    assert_same(federation.server.control.as_state(), mean_control(federation, range(CLIENTS)), 1e-6)


def test_novel_clients_do_not_count():
    data = Toy(novel_clients=1)
    federation = run(METHOD, 3, cohorts=[[0, 2], [1, 2]], data=data)
    assert len(data.participating) == CLIENTS - 1
    assert_same(federation.server.control.as_state(), mean_control(federation, data.participating), 1e-6)
    [novel] = data.novel
    own = named(federation.client_model(novel))
    assert_same(own, {name: federation.server.weights.as_state()[name] for name in own})


class Refused(SCAFFOLD):
    """Client 2 uploads what the server refuses."""

    def make_update(self, context, before):
        update = super().make_update(context, before)
        return replace(update, num_samples=0) if context.client == 2 else update


def test_a_refused_update_moves_neither_variate():
    with pytest.warns(UserWarning, match="left out of the aggregation: client 2"):
        federation = run(partial(Refused, lr=LR, epochs=1), 2, cohorts=COHORTS)
    assert_same(federation.server.control.as_state(), mean_control(federation, range(CLIENTS)), 1e-6)


def test_both_controls_agree_for_one_step_on_all_samples():
    data = partial(Toy, batch_size=20)
    fit = partial(SCAFFOLD, lr=LR, epochs=1, weight_decay=0.0)
    runs = [
        run(partial(fit, control=control), 2, cohorts=COHORTS, data=data(), precision="64-true")
        for control in ("steps", "gradient")
    ]
    assert_same(runs[0].server.control.as_state(), runs[1].server.control.as_state(), 1e-9)
    assert_same(runs[0].server.weights.as_state(), runs[1].server.weights.as_state(), 1e-9)


def test_what_travels():
    federation = run(METHOD, 1, cohorts=COHORTS)
    sent, weights = federation.server.broadcast(0, 1), federation.server.weights.as_state()
    assert sent.num_bytes == 2 * sum(w.numel() * w.element_size() for w in weights.values())


def test_variates_cover_parameters_and_leave_statistics_alone():
    data = Toy([[0] * 6 + [1] * 6, [1] * 4 + [2] * 4], batch_size=BATCH)
    for control in ("steps", "gradient"):
        federation = run(partial(METHOD, control=control), 1, cohorts=[[0, 1]], data=data, encoder=normed_encoder)
        client = federation.clients.model_of(0)
        names = {name for name, _ in client.named_parameters()}
        assert federation.server.control.as_state().keys() == names
        tracked = federation.server.weights.as_state()["encoder.1.num_batches_tracked"]
        assert int(tracked) == round(EPOCHS * (3 + 2) / 2)  # the mean over clients, of the steps alone


def test_fine_tuning_knows_nothing_of_the_variates():
    federation = run(partial(METHOD, fine_tune="head", fine_tune_epochs=1), 2, cohorts=COHORTS)
    plain = run(METHOD, 2, cohorts=COHORTS)
    assert_same(federation.server.weights.as_state(), plain.server.weights.as_state())
    assert federation.test_scores[1].loss != plain.test_scores[1].loss


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"optimizer": torch.optim.Adam},
            ConfigurationError,
            r"makes Adam .*no other option of the optimizer, or use control=",
        ),
        ({"lr_scheduler": partial(StepLR, step_size=1)}, ConfigurationError, r"one with a schedule .*or use control="),
        ({"lr": 0.0}, ValueError, "must be a finite number above 0"),
        ({"momentum": 1.0}, ValueError, "momentum must be below 1"),
        ({"control": "drift"}, ValueError, "control must be one of"),
        ({"server_lr": -1.0}, ValueError, r"server_lr \(eta_g\) must be a finite number of at least 0"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        run(partial(SCAFFOLD, **options), 1)


def test_clipped_steps_are_no_mean_of_gradients():
    clips = SequentialEngine(gradient_clip_val=0.5)
    with pytest.raises(
        ConfigurationError, match=r"gradient_clip_val=0.5\): leave clipping out, or use control=\"gradient\""
    ):
        run(METHOD, 1, engine=clips)
    federation = run(partial(METHOD, control="gradient"), 2, cohorts=COHORTS, engine=clips)
    assert_same(federation.server.control.as_state(), mean_control(federation, range(CLIENTS)), 1e-6)


class OwnOptimizer(SCAFFOLD):
    """Makes its optimizer itself."""

    def __init__(self, *args, make, **options):
        super().__init__(*args, **options)
        self.make = make

    def configure_optimizers(self):
        return self.make([parameter for parameter in self.parameters() if parameter.requires_grad])


class OwnPhases(SCAFFOLD):
    """Phases of its own."""

    def __init__(self, encoder, num_classes, *, own, **options):
        super().__init__(encoder, num_classes, **options)
        self.own = own

    def phases(self):
        return self.own


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)


def scheduled(parameters):
    optimizer = SGD(parameters)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def two_rates(parameters):
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.4}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.5)


@pytest.mark.parametrize(
    ("make", "made"),
    [
        (torch.optim.Adam, "Adam"),
        (partial(SGD, lr=0.01), "SGD with lr=0.01, momentum=0.5"),
        (partial(SGD, momentum=0.9), "SGD with lr=0.05, momentum=0.9"),
        (partial(SGD, nesterov=True), "SGD with lr=0.05, momentum=0.5, nesterov=True"),
        (partial(SGD, dampening=0.1), r"SGD with lr=0.05, momentum=0.5, dampening=0.1"),
        (two_rates, "SGD with lr=0.05, momentum=0.5 and SGD with lr=0.4, momentum=0.5"),
        (scheduled, "several optimizers, or one with a schedule"),
        (lambda parameters: [SGD(parameters[:2]), SGD(parameters[2:])], "several optimizers, or one with a schedule"),
    ],
)
def test_steps_of_another_optimizer_are_no_mean_of_gradients(make, made):
    own = partial(OwnOptimizer, make=make, lr=0.05, momentum=0.5, epochs=1)
    expected = rf"OwnOptimizer makes {made} \(.*, expected SGD with lr=0.05, momentum=0.5: .*use control=\"gradient\""
    with pytest.raises(ConfigurationError, match=expected):
        run(own, 1)
    OwnOptimizer(tiny_encoder((6,)), 5, make=make, control="gradient").check_run(RunFacts(5, 1))


def test_a_phase_at_another_rate_is_refused():
    with pytest.raises(ConfigurationError, match=r"OwnPhases makes SGD with lr=0.3, momentum=0.5"):
        run(partial(OwnPhases, own=(Phase(epochs=1, lr=0.3),), lr=0.05), 1)


TWICE = (Phase(epochs=1), Phase("again", epochs=1))


def test_steps_of_several_phases_are_no_mean_of_gradients():
    """The second would begin without momentum."""
    with pytest.raises(
        ConfigurationError, match=r"one phase, whose momentum continues.*has 2.*use control=\"gradient\""
    ):
        run(partial(OwnPhases, own=TWICE, lr=0.05), 1)
    run(partial(OwnPhases, own=TWICE, lr=0.05, control="gradient"), 1)


@pytest.mark.parametrize("control", ["steps", "gradient"])
@pytest.mark.parametrize("also", [(), (Phase("encoder", ("encoder.*",), 1),)])
def test_a_phase_that_trains_a_part_is_refused(control, also):
    own = (Phase("head", ("head.*",), 1), *also)
    with pytest.raises(ConfigurationError, match="OwnPhases has phases that train a part of it"):
        run(partial(OwnPhases, own=own, lr=0.05, control=control), 1)


@pytest.mark.parametrize(
    "wrap",
    [lambda made: made, lambda made: [made], lambda made: {"optimizer": made}, lambda made: ([made], [])],
)
def test_an_own_optimizer_that_is_the_same_trains_the_same(wrap):
    own = partial(OwnOptimizer, make=lambda parameters: wrap(SGD(parameters, weight_decay=5e-4)), lr=0.05, epochs=1)
    found, expected = run(own, 2, cohorts=COHORTS), run(partial(SCAFFOLD, lr=0.05, epochs=1), 2, cohorts=COHORTS)
    assert_same(found.server.control.as_state(), expected.server.control.as_state())


def test_gradient_takes_any_optimizer():
    adam = partial(METHOD, control="gradient", optimizer=partial(torch.optim.Adam, lr=0.01))
    federation = run(adam, 2, cohorts=COHORTS)
    assert_same(federation.server.control.as_state(), mean_control(federation, range(CLIENTS)), 1e-6)


def test_a_change_of_other_shape_is_refused():
    federation = run(METHOD, 1, cohorts=COHORTS)
    client = federation.clients.model_of(0)
    weights = {name: tensor.clone() for name, tensor in federation.server.weights.as_state().items()}
    change = {name: tensor[:1] for name, tensor in client.own_control.as_state().items()}
    update = federation.server.update_class(client=0, round=1, num_samples=3, weights=weights, control_change=change)
    with pytest.raises(InvalidMessageError, match="control_change differs from the control variate in"):
        federation.server.receive(update)


def test_the_gradient_of_many_samples_is_not_lost_in_float16():
    """A share of 1 / 20,000 of a confident prediction's gradient is below the smallest number of float16."""
    data = Toy([[2] * 20_000], batch_size=BATCH)
    data.setup()
    part = data.client_data(0).train
    client = SCAFFOLD(tiny_encoder((6,)), 5, control="gradient")
    with torch.no_grad():
        client.head.bias[2] += 8
    params = {name: p.detach() for name, p in client.named_parameters()}
    exact = full_gradient(client, params, FitData(part, BATCH))
    half = FitData(part, BATCH, forward_context=partial(torch.autocast, "cpu", dtype=torch.float16))
    for name, gradient in full_gradient(client, params, half).items():
        assert (gradient - exact[name]).norm() < 1e-2 * exact[name].norm(), name
