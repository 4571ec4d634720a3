"""FedPHP against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, sgd
from _helpers.toy import CLIENTS, Toy, assert_same, dropout_encoder, normed_encoder, own_model, run, whole_state
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.losses import maximum_mean_discrepancy
from pfl_lightning.methods import FedAvg, FedPHP

LR, EPOCHS, MU, LAM, TAU = 0.05, 2, 0.8, 0.3, 3.0
COHORTS = [[0, 2, 3], [1, 2], [0, 2, 4]]
METHOD = partial(FedPHP, lr=LR, epochs=EPOCHS, mu=MU, lam=LAM, temperature=TAU)


def slow_mmd(first, second, widths=None):
    """The definition, pair by pair."""
    rows = [*first, *second]
    squares = [[((a - b) ** 2).sum() for b in rows] for a in rows]
    if widths is None:
        mean = sum(s.item() for line in squares for s in line) / (len(rows) * (len(rows) - 1)) + 1e-8
        widths = [mean * 2.0**power for power in range(-2, 3)]
    kernel = [[sum(torch.exp(-s / w) for w in widths) for s in line] for line in squares]
    n, m = len(first), len(second)
    within = sum(sum(line[:n]) for line in kernel[:n]) / n**2 + sum(sum(line[n:]) for line in kernel[n:]) / m**2
    return within - 2 * sum(sum(line[n:]) for line in kernel[:n]) / (n * m)


@pytest.mark.parametrize("widths", [None, [20.0, 30.0, 40.0, 100.0]])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 3)])
def test_the_discrepancy(widths, n, m):
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(size, 4, generator=generator, dtype=torch.float64) + 30 for size in (n, m))
    first.requires_grad_()
    got, expected = maximum_mean_discrepancy(first, second, widths), slow_mmd(first, second, widths)
    torch.testing.assert_close(got, expected)
    slopes = (torch.autograd.grad(value, first)[0] for value in (got, expected))
    torch.testing.assert_close(*slopes)


def test_equal_features_lie_nowhere_apart():
    features = torch.randn(6, 4).requires_grad_()
    distance = maximum_mean_discrepancy(features, features.detach())
    distance.backward()
    assert abs(float(distance)) < 1e-6
    assert torch.all(features.grad.abs() < 1e-6)
    same = torch.ones(3, 4)
    assert float(maximum_mean_discrepancy(same, same)) == 0


def taught(private, transfer):
    """(1 - lambda) CE + lambda times the distance to the private model."""

    def loss(net, inputs, labels):
        if transfer == "mmd":
            distance = slow_mmd(net.encoder(inputs), private.encoder(inputs).detach())
        else:
            wanted = F.softmax(private(inputs).detach() / TAU, dim=1)
            distance = -(wanted * F.log_softmax(net(inputs), dim=1)).sum() / len(inputs)
        return (1 - LAM) * cross_entropy(net, inputs, labels) + LAM * distance

    return loss


def restate(transfer):
    """The global model and every client's private one after the rounds; ``None`` for clients that never trained."""
    data, net, private = Toy(), first_net(), [None] * CLIENTS
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            mu = MU * round / len(COHORTS) if private[client] else 0.0
            own, local = private[client] or copy_of(net), copy_of(net)
            steps = batches(data, client, round, "fit/0", EPOCHS)
            sgd(local, steps, list(local.parameters()), LR, taught(own, transfer))
            trained.append(named(local))
            kept = named(own)
            private[client] = copy_of(own)
            put(private[client], {name: mu * kept[name] + (1 - mu) * new for name, new in trained[-1].items()})
        put(net, mean_of(trained, [len(data.labels[client]) for client in cohort]))
    return net, private


@pytest.mark.parametrize("transfer", ["mmd", "kd"])
def test_rounds_equal_the_restatement(transfer):
    federation = run(partial(METHOD, transfer=transfer), len(COHORTS), cohorts=COHORTS)
    net, private = restate(transfer)
    for client in range(CLIENTS):
        state = own_model(federation, client).state_dict()
        assert_same({n: state[f"global_model.{n}"] for n in named(net)}, named(net), atol=1e-5)
        assert_same({n: state[n] for n in named(net)}, named(private[client] or net), atol=1e-5)


@pytest.mark.parametrize("transfer", ["mmd", "kd"])
@pytest.mark.parametrize("engine", [TrainerEngine, VectorizedEngine])
def test_engines_agree(engine, transfer):
    method = partial(METHOD, transfer=transfer)
    one, other = (
        run(method, 3, cohorts=COHORTS, data=Toy(drop_last=True), encoder=normed_encoder, engine=made)
        for made in (None, engine())
    )
    assert_same(whole_state(other), whole_state(one), atol=1e-5)


def test_without_weight_the_global_model_is_that_of_fedavg():
    ours, plain = run(partial(METHOD, lam=0.0), 2), run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2)
    sent = {name.removeprefix("global_model."): w for name, w in ours.server.weights.as_state().items()}
    assert_same(sent, plain.server.weights.as_state(), atol=1e-7)


def test_without_momentum_the_private_model_is_what_the_last_fit_ended_with():
    federation = run(partial(METHOD, mu=0.0), 3, cohorts=COHORTS)
    alone = run(partial(METHOD, mu=0.0, eval_model="trained"), 3, cohorts=COHORTS)
    for client in range(CLIENTS - 1):  # the last one trains in the last round
        state, trained = (own_model(one, client).state_dict() for one in (federation, alone))
        names = [name for name in state if name.startswith(("encoder.", "head."))]
        if client != 1:
            assert_same({n: state[n] for n in names}, {n: trained[f"global_model.{n}"] for n in names})


def test_the_private_model_teaches_without_dropout():
    """With equal weights and dropout, the features of both differ by the dropout of the local model alone."""
    federation = run(METHOD, 1, encoder=dropout_encoder)
    model = own_model(federation, 0)
    model.phase = model.phases()[0]
    model.train()
    for layer in model.frozen_norms():
        layer.eval()
    inputs = Toy().tensors(0)[0]
    assert torch.equal(model.encoder(inputs), model.encoder(inputs))
    assert not torch.equal(model.encode(inputs), model.encode(inputs))


def test_a_run_without_end_is_refused():
    with pytest.raises(ConfigurationError, match="planned number of rounds, and the Trainer has none"):
        run(METHOD, -1, max_time="00:00:00:01")


def test_the_rounds_of_the_schedule_may_be_given():
    ours, planned = (run(partial(METHOD, rounds=rounds), 3, cohorts=COHORTS) for rounds in (3, None))
    assert_same(whole_state(ours), whole_state(planned))


@pytest.mark.parametrize(
    "options", [{"mu": 1.5}, {"rounds": 0}, {"lam": -0.1}, {"transfer": "l3"}, {"temperature": 0.0}]
)
def test_arguments_that_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        run(partial(METHOD, **options))
