"""APFL against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, score
from _helpers.toy import (
    CLIENTS,
    Toy,
    assert_same,
    normed_encoder,
    own_model,
    run,
    tiny_encoder,
    whole_state,
)
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.functional import scores_at
from pfl_lightning.methods import APFL, FedAvg, LocalOnly

LR, EPOCHS, ALPHA = 0.05, 2, 0.3
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(APFL, lr=LR, epochs=EPOCHS, alpha=ALPHA)
READINGS = {
    "parameters": {},
    "outputs": {"mixing": "outputs"},
    "adaptive": {"adaptive": True, "alpha_lr": 0.5},
    "adaptive outputs": {"adaptive": True, "alpha_lr": 0.5, "alpha_decay": 0.2, "mixing": "outputs"},
}


def mixture(v, w, alpha, inputs, mixing="parameters"):
    """Scores of alpha v + (1 - alpha) w, differentiable in v and alpha."""
    if mixing == "outputs":
        return alpha * v(inputs) + (1 - alpha) * w(inputs).detach()
    fixed = dict(w.named_parameters())
    return functional_call(
        v, {n: alpha * p + (1 - alpha) * fixed[n].detach() for n, p in v.named_parameters()}, (inputs,)
    )


def fit(w, v, alpha, steps, *, adaptive=False, alpha_lr=None, alpha_decay=0.0, mixing="parameters"):
    """Simultaneous SGD steps of w and v, with momentum 0.5 and weight decay 5e-4; alpha moves at the first."""
    velocity = {id(p): torch.zeros_like(p) for net in (w, v) for p in net.parameters()}
    for number, (inputs, labels) in enumerate(steps):
        slope_alpha = torch.tensor(alpha, requires_grad=True)
        loss = F.cross_entropy(mixture(v, w, slope_alpha, inputs, mixing), labels)
        own = torch.autograd.grad(loss, [*v.parameters(), slope_alpha])
        shared = torch.autograd.grad(cross_entropy(w, inputs, labels), list(w.parameters()))
        with torch.no_grad():
            for net, gradients in ((v, own[:-1]), (w, shared)):
                for p, g in zip(net.parameters(), gradients, strict=True):
                    velocity[id(p)].mul_(0.5).add_(g + 5e-4 * p)
                    p.sub_(LR * velocity[id(p)])
        if adaptive and number == 0:
            alpha = min(max(alpha - alpha_lr * (float(own[-1]) + alpha_decay * alpha), 0.0), 1.0)
    return alpha


def restate(**options):
    """w, every client's v and alpha after the rounds; ``None`` for clients that never trained."""
    data, shared = Toy(), first_net()
    personal, alphas = [None] * CLIENTS, [ALPHA] * CLIENTS
    for round, cohort in enumerate(COHORTS):
        uploads = []
        for client in cohort:
            w = copy_of(shared)
            v = personal[client] = personal[client] or copy_of(shared)
            alphas[client] = fit(w, v, alphas[client], batches(data, client, round, "fit/0", EPOCHS), **options)
            uploads.append(named(w))
        put(shared, mean_of(uploads, [len(data.labels[k]) for k in cohort]))
    return shared, personal, alphas


class Mixed(torch.nn.Module):
    def __init__(self, v, w, alpha, mixing="parameters"):
        super().__init__()
        self.forward = lambda inputs: mixture(v, w, alpha, inputs, mixing)


@pytest.mark.parametrize("options", READINGS.values(), ids=READINGS)
def test_rounds_equal_the_restatement(options):
    data = Toy()
    federation = run(partial(METHOD, **options), 2, cohorts=COHORTS, data=data)
    shared, personal, alphas = restate(**options)
    sent = {name.removeprefix("global_model."): t for name, t in federation.server.weights.as_state().items()}
    assert_same(sent, named(shared), atol=1e-6)
    # At the beginning of a client's first fit v is w, so that only the one that takes part again moves its alpha.
    moved = {"alpha_lr": {2}, "alpha_decay": {0, 1, 2, 3}}
    assert {k for k, alpha in enumerate(alphas) if alpha != ALPHA} == set().union(*(moved.get(o, ()) for o in options))
    for client, v in enumerate(personal):
        model = own_model(federation, client)
        assert float(model.alpha) == pytest.approx(alphas[client], abs=1e-5)
        own = {n: p for n, p in named(model).items() if not n.startswith("global_model.")}
        assert_same(own, named(v or shared), atol=1e-6)
        plain = Mixed(v or shared, shared, alphas[client], options.get("mixing", "parameters"))
        expected = score(plain, data, client, "test")
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(expected, abs=1e-5)


def test_alpha_zero_is_fedavg():
    apfl = run(partial(APFL, lr=LR, epochs=EPOCHS, alpha=0.0), 2, cohorts=COHORTS)
    fedavg = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2, cohorts=COHORTS)
    sent = {name.removeprefix("global_model."): t for name, t in apfl.server.weights.as_state().items()}
    assert_same(sent, fedavg.server.weights.as_state(), atol=1e-7)
    for client, expected in fedavg.test_scores.items():
        got = apfl.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx((expected.accuracy, expected.loss), abs=1e-6)


@pytest.mark.parametrize("part", ["head", "all"])
def test_a_fine_tuning_adapts_the_mixture(part):
    """At alpha 0, too, where v has no gradient: it is FedAvg's."""
    tuning = {"fine_tune": part, "fine_tune_epochs": 2}
    got = run(partial(METHOD, alpha=0.0, **tuning), 1)
    expected = run(partial(FedAvg, lr=LR, epochs=EPOCHS, **tuning), 1)
    for client, fedavg in expected.test_scores.items():
        assert got.test_scores[client].loss == pytest.approx(fedavg.loss, abs=1e-5)
        assert float(got.personal.get(client)["alpha"]) == 0


def test_alpha_one_is_local_training():
    everybody = [range(CLIENTS), [1, 2]]
    apfl = run(partial(APFL, lr=LR, epochs=EPOCHS, alpha=1.0), 2, cohorts=everybody)
    alone = run(partial(LocalOnly, lr=LR, epochs=EPOCHS), 2, cohorts=everybody)
    for client, expected in alone.test_scores.items():
        got = apfl.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx((expected.accuracy, expected.loss), abs=1e-6)


def test_the_global_model_does_not_depend_on_the_personal_ones():
    one, other = (run(partial(METHOD, epochs=1, **more), 1).server.weights.as_state() for more in ({}, {"alpha": 0.9}))
    assert_same(one, other)


def test_alpha_moves_once_a_fit_by_the_slope_along_v_minus_w():
    """<v - w, grad F(v_bar)>, the gradient at the mixture; and it stays in [0, 1]."""
    client = APFL(normed_encoder((6,)), 5, lr=0.1, alpha=ALPHA, adaptive=True).double()
    with torch.no_grad():
        for p in client.network_parameters().values():
            p.add_(torch.randn_like(p))
    inputs, labels = torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 5
    w = {name: p.detach() for name, p in client.global_model.named_parameters()}
    v = {name: p.detach() for name, p in client.network_parameters().items()}
    mixed = {name: (ALPHA * v[name] + (1 - ALPHA) * w[name]).requires_grad_() for name in v}
    loss = F.cross_entropy(scores_at(client, mixed, inputs), labels)
    gradients = torch.autograd.grad(loss, list(mixed.values()))
    slope = sum(((v[n] - w[n]) * g).sum() for n, g in zip(mixed, gradients, strict=True))

    client.before_fit(None)
    moved = []
    for index in (0, 1, 0):  # the first batch of a fit, the second, and the first of the second epoch
        client.training_step((inputs, labels), index)["loss"].backward()
        moved.append(float(client.alpha))
    assert moved == pytest.approx([ALPHA - 0.1 * float(slope)] * 3, abs=1e-7)
    assert int(client.encoder[1].num_batches_tracked) == 3  # its statistics move once a step
    for rate, bound in ((1e6, 0.0), (-1e6, 1.0)):
        client.alpha_lr = rate if float(slope) > 0 else -rate
        client.alpha.fill_(ALPHA)
        client.before_fit(None)
        client.training_step((inputs, labels), 0)
        assert float(client.alpha) == bound


def test_the_gradients_stop_where_they_should():
    client = APFL(tiny_encoder((6,)), 5, alpha=ALPHA)
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    for losses, prefix in (("mixture", "global_model."), ("cross_entropy", ("encoder.", "head."))):
        client.zero_grad()
        scores = client._global_scores(batch[0])
        terms = {"cross_entropy": scores, "mixture": client._mixed_scores(client.alpha, batch[0], scores.detach())}
        F.cross_entropy(terms[losses], batch[1]).backward()
        touched = {name for name, p in client.named_parameters() if p.grad is not None}
        assert touched
        assert not any(name.startswith(prefix) for name in touched)


@pytest.mark.parametrize("engine", [TrainerEngine, partial(VectorizedEngine, forward="vmap")])
def test_every_engine_gives_the_same(engine):
    """With batch normalization and an alpha that moves, whose rate makes an error visible."""
    method = partial(METHOD, epochs=1, adaptive=True, alpha_lr=0.5)
    options = {"cohorts": COHORTS, "encoder": normed_encoder, "precision": "64-true"}
    got = run(method, 2, engine=engine(), data=Toy(batch_size=9), **options)
    expected = run(method, 2, data=Toy(batch_size=9), **options)
    assert_same(whole_state(got), whole_state(expected), atol=1e-9)


def test_a_client_that_never_trained_has_the_global_model():
    federation = run(METHOD, 1, data=Toy(novel_clients=2), cohorts=[range(3)])
    shared = first_net()
    put(shared, {n.removeprefix("global_model."): t for n, t in federation.server.weights.as_state().items()})
    inputs = torch.randn(7, 6)
    for client in federation.data.novel:
        torch.testing.assert_close(own_model(federation, client)(inputs), shared(inputs))


def test_a_new_head_is_fitted_on_the_mixtures_encoder():
    federation = run(METHOD, 1)
    model = own_model(federation, 2)
    mixed = model._mixed_parameters(model.alpha)
    for name, tensor in model.encoder_state().items():
        torch.testing.assert_close(tensor, mixed[name].detach())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha must be between 0 and 1, got 1.5"),
        ({"alpha": -0.1}, "alpha must be between 0 and 1"),
        ({"alpha_lr": -1.0}, "alpha_lr"),
        ({"alpha_decay": -1.0}, "alpha_decay"),
        ({"mixing": "weights"}, "mixing must be one of"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        APFL(tiny_encoder((6,)), 5, **options)


def test_a_fine_tuning_of_mixed_outputs_leaves_the_global_model():
    seen = []

    class Watched(APFL):
        def evaluate(self, *args, **options):
            seen.append({name: value.clone() for name, value in self.global_model.state_dict().items()})
            return super().evaluate(*args, **options)

    def go(**options):
        seen.clear()
        run(partial(Watched, mixing="outputs", **options), encoder=normed_encoder, data=Toy(batch_size=9))
        return seen[-1]

    tuned, plain = go(fine_tune="all", fine_tune_epochs=3), go()
    assert all(torch.equal(tuned[name], plain[name]) for name in plain)
