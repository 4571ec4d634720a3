"""FedCP against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, mean_of
from _helpers.toy import CLIENTS, SEED, Toy, assert_same, normed_encoder, own_model, run, tiny_encoder, whole_state
from torch import nn
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedCP
from pfl_lightning.seeding import derive_seed

LR, EPOCHS, LAM = 0.05, 2, 0.6
COHORTS = [[0, 2, 3], [1, 2], [0, 2, 4]]
METHOD = partial(FedCP, lr=LR, epochs=EPOCHS, lam=LAM)
SHARED = ("encoder.", "policy.", "global_head.")


def first_state():
    """The first weights of all clients, by name."""
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    return {
        n: t.clone() for n, t in FedCP(tiny_encoder((6,)), 5).state_dict().items() if n.startswith((*SHARED, "head."))
    }


def encoded(state, inputs):
    """Two layers with tanh."""
    for layer in ("encoder.0", "encoder.2"):
        inputs = torch.tanh(inputs @ state[f"{layer}.weight"].T + state[f"{layer}.bias"])
    return inputs


def scored(state, features, condition):
    """Row by row: the policy's two numbers for each feature, their softmax, and what each head makes of its part."""
    rows = []
    for row in features:
        a = state["policy.layers.0.weight"] @ (row * condition) + state["policy.layers.0.bias"]
        a = (a - a.mean()) / torch.sqrt(a.var(unbiased=False) + 1e-5)
        a = F.relu(a * state["policy.layers.1.weight"] + state["policy.layers.1.bias"])
        personal, common = a[: len(row)].exp(), a[len(row) :].exp()
        r, s = personal / (personal + common), common / (personal + common)
        own = state["head.weight"] @ (r * row) + state["head.bias"]
        rows.append(own + state["global_head.weight"] @ (s * row) + state["global_head.bias"])
    return torch.stack(rows)


def discrepancy(first, second):
    """By the definition, with the published widths: exp(-||a - b||^2 / (2 w)) for w of 10, 15, 20 and 50."""

    def mean(left, right):
        return sum(
            torch.exp(-((a - b) ** 2).sum() / (2 * w)) for a in left for b in right for w in (10, 15, 20, 50)
        ) / (len(left) * len(right))

    return mean(first, first) + mean(second, second) - 2 * mean(first, second)


def fit(state, steps, condition):
    """SGD with momentum 0.5 and weight decay 5e-4; the global head does not train."""
    received = {name: tensor.clone() for name, tensor in state.items()}
    trained = [name for name in state if not name.startswith("global_head.")]
    velocity = {name: torch.zeros_like(state[name]) for name in trained}
    for inputs, labels in steps:
        at = {name: tensor.detach().requires_grad_(name in trained) for name, tensor in state.items()}
        features = encoded(at, inputs)
        loss = F.cross_entropy(scored(at, features, condition), labels)
        loss = loss + LAM * discrepancy(features, encoded(received, inputs))
        slopes = torch.autograd.grad(loss, [at[name] for name in trained])
        for name, slope in zip(trained, slopes, strict=True):
            velocity[name] = 0.5 * velocity[name] + slope + 5e-4 * state[name]
            state[name] = state[name] - LR * velocity[name]


def restate():
    """The shared state and every client's own head after the rounds; ``None`` for clients that never trained."""
    data, first = Toy(), first_state()
    shared = {name: tensor for name, tensor in first.items() if not name.startswith("head.")}
    heads = [None] * CLIENTS
    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            head = heads[client] or {
                n.removeprefix("global_"): t for n, t in shared.items() if n.startswith("global_head.")
            }
            state = {**shared, **head}
            v = head["head.weight"].sum(dim=0)
            fit(state, batches(data, client, round, "fit/0", EPOCHS), v / v.norm())
            heads[client] = {name: tensor for name, tensor in state.items() if name.startswith("head.")}
            for name in ("weight", "bias"):
                state[f"global_head.{name}"] = (state[f"global_head.{name}"] + state[f"head.{name}"]) / 2
            sent.append({name: state[name] for name in shared})
        shared = mean_of(sent, [len(data.labels[client]) for client in cohort])
    return shared, heads


def test_rounds_equal_the_restatement():
    data = Toy()
    federation = run(METHOD, len(COHORTS), cohorts=COHORTS, data=data)
    shared, heads = restate()
    assert_same(federation.server.weights.as_state(), shared, atol=2e-5)
    for client in range(CLIENTS):
        own = own_model(federation, client).eval()
        head = heads[client] or {
            n.removeprefix("global_"): t for n, t in shared.items() if n.startswith("global_head.")
        }
        assert_same({name: own.state_dict()[name] for name in head}, head, atol=2e-5)
        v = head["head.weight"].sum(dim=0)
        inputs = data.tensors(client, "test")[0]
        expected = scored({**shared, **head}, encoded(shared, inputs), v / v.norm())
        torch.testing.assert_close(own(inputs).detach(), expected, rtol=0, atol=1e-4)


def test_the_personal_head_moves_and_the_global_one_does_not_train():
    federation = run(METHOD, 1)
    first, sent = first_state(), federation.server.weights.as_state()
    heads = [own_model(federation, client).head.weight.detach() for client in range(CLIENTS)]
    sizes = [len(own) for own in Toy().labels]
    mean = sum(n * (head + first["global_head.weight"]) / 2 for n, head in zip(sizes, heads, strict=True)) / sum(sizes)
    torch.testing.assert_close(sent["global_head.weight"], mean, rtol=0, atol=1e-6)
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("engine", [TrainerEngine, VectorizedEngine])
def test_engines_agree(engine):
    one, other = (
        run(METHOD, 3, cohorts=COHORTS, data=Toy(drop_last=True), encoder=normed_encoder, engine=made)
        for made in (None, engine())
    )
    assert_same(whole_state(other), whole_state(one), atol=1e-5)


def test_an_exported_model_predicts_as_the_client_does():
    federation = run(METHOD, 2, cohorts=COHORTS)
    inputs = Toy().tensors(2, "test")[0]
    own, exported = own_model(federation, 2).eval(), federation.client_model(2).eval()
    assert float(exported.condition.norm()) == pytest.approx(1)
    assert torch.equal(exported(inputs), own(inputs))


def test_recurrent_layers_are_refused():
    class Recurrent(nn.Module):
        out_features = 4

        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(6, 4)

    with pytest.raises(ConfigurationError, match="recurrent layer GRU"):
        FedCP(Recurrent(), 5)


def test_lambda_is_no_negative_number():
    with pytest.raises(ConfigurationError, match=r"lam \(lambda\)"):
        FedCP(tiny_encoder((6,)), 5, lam=-1.0)
