"""Every method on a user's module equals the plain restatement, under both engines."""

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, score, sgd
from _helpers.project import Net, run_project
from _helpers.toy import CLIENTS, Toy, assert_same

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.methods import Ditto, FedAvg, FedBABU, FedPer, FedProx, FedRep, LGFedAvg, LocalOnly

LR, EPOCHS, MU = 0.05, 2, 0.3
COHORTS = [[0, 2, 3], [1, 2]]
ENGINES = {"sequential": SequentialEngine, "trainer": TrainerEngine}

WHOLE = [("", EPOCHS, LR)]
RULES = {
    "LocalOnly": (LocalOnly, {}, None, WHOLE),
    "FedAvg": (FedAvg, {}, "", WHOLE),
    "FedProx": (FedProx, {"mu": MU}, "", WHOLE),
    "FedPer": (FedPer, {}, "encoder.", WHOLE),
    "LGFedAvg": (LGFedAvg, {}, "head.", WHOLE),
    "FedRep": (FedRep, {"head_epochs": 3, "head_lr": 0.2}, "encoder.", [("head.", 3, 0.2), ("encoder.", EPOCHS, LR)]),
    "FedBABU": (FedBABU, {"fine_tune": None}, "encoder.", [("encoder.", EPOCHS, LR)]),
}


def as_plain(module):
    """The module's parameters under the restatement's names."""
    return {n.replace("body.", "encoder.").replace("fc.", "head."): p.detach() for n, p in module.named_parameters()}


def restate(rule, data):
    """Every client's model after two rounds of some of the clients, and what the server has."""
    _, options, shared, phases = rule
    models, server = [first_net() for _ in range(CLIENTS)], named(first_net())
    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            net, reference = models[client], named(models[client])

            def proximal(net, inputs, labels, reference=reference):
                squares = [((p - reference[name]) ** 2).sum() for name, p in net.named_parameters()]
                return cross_entropy(net, inputs, labels) + MU / 2 * sum(squares)

            loss = proximal if "mu" in options else cross_entropy
            for index, (prefix, epochs, lr) in enumerate(phases):
                train = [p for name, p in net.named_parameters() if name.startswith(prefix)]
                sgd(net, batches(data, client, round, f"fit/{index}", epochs), train, lr, loss)
        if shared is not None:
            mean = mean_of([named(models[k], shared) for k in cohort], [len(data.labels[k]) for k in cohort])
            server |= mean
            for net in models:
                put(net, mean)
    return models, server


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rounds_equal_the_restatement(rule, engine):
    method, options, _, _ = rule
    data, module = Toy(), Net(LR)
    federation, trainer = run_project(
        method, 2, module=module, cohorts=COHORTS, engine=engine(), epochs=EPOCHS, head="fc", **options
    )
    models, server = restate(rule, data)
    samples = losses = 0.0
    for client, model in enumerate(models):
        own = federation.client_model(client)
        assert type(own) is Net
        assert_same(as_plain(own), named(model), atol=1e-6)
        accuracy, loss = score(model, data, client, "test")
        got = federation.test_scores[client]
        assert got.accuracy == pytest.approx(accuracy)
        assert got.logged["test_loss"] == pytest.approx(loss, abs=1e-5)
        samples, losses = samples + got.num_samples, losses + loss * got.num_samples
    assert float(trainer.callback_metrics["test_loss"]) == pytest.approx(losses / samples, abs=1e-5)
    assert_same(as_plain(module), server, atol=1e-6)  # the author's module holds the global model


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_ditto_equals_the_restatement(engine):
    data, module = Toy(), Net(LR)
    options = {"lam": MU, "personal_epochs": 3, "epochs": EPOCHS}
    federation, _ = run_project(Ditto, 2, module=module, cohorts=COHORTS, engine=engine(), **options)
    shared, personal = first_net(), [first_net() for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        uploads = []
        for client in cohort:
            received = named(shared)

            def held(net, inputs, labels, received=received):
                squares = [((p - received[name]) ** 2).sum() for name, p in net.named_parameters()]
                return cross_entropy(net, inputs, labels) + MU / 2 * sum(squares)

            own, local = personal[client], copy_of(shared)
            sgd(own, batches(data, client, round, "fit/0", 3), list(own.parameters()), LR, held)
            sgd(local, batches(data, client, round, "fit/1", EPOCHS), list(local.parameters()), LR)
            uploads.append(named(local))
        put(shared, mean_of(uploads, [len(data.labels[k]) for k in cohort]))
    for client, model in enumerate(personal):
        assert_same(as_plain(federation.client_model(client)), named(model), atol=1e-6)
        assert federation.test_scores[client].accuracy == pytest.approx(score(model, data, client, "test")[0])
    assert_same(as_plain(module), named(shared), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_fine_tuning_serves_the_evaluation(engine):
    data = Toy()
    options = {"fine_tune": "head", "fine_tune_epochs": 2, "fine_tune_lr": 0.3, "epochs": EPOCHS}
    federation, _ = run_project(FedAvg, 2, module=Net(LR), cohorts=COHORTS, engine=engine(), **options)
    for client, model in enumerate(restate(RULES["FedAvg"], data)[0]):
        head = [p for name, p in model.named_parameters() if name.startswith("head.")]
        sgd(model, batches(data, client, 1, "personalize/0", 2), head, 0.3)
        assert federation.test_scores[client].logged["test_loss"] == pytest.approx(
            score(model, data, client, "test")[1], abs=1e-5
        )


def test_fedbn_keeps_batch_normalization_on_the_client():
    from pfl_lightning.methods import FedBN

    module = Net(norm=True)
    federation, _ = run_project(FedBN, 1, module=module, data=None, num_clients=3)
    one, two = federation.client_model(0).state_dict(), federation.client_model(1).state_dict()
    own = {name for name in one if not torch.equal(one[name], two[name])}
    expected = {f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert expected <= own <= expected | {"body.1.num_batches_tracked"}


@pytest.mark.parametrize("method", [FedAvg, FedPer], ids=lambda method: method.__name__)
def test_running_statistics_of_a_users_module_stay_where_the_run_says_so(method):
    from _helpers.toy import own_model

    federation, _ = run_project(
        method, 1, module=Net(norm=True), data=None, num_clients=3, head="fc", batch_norm="own_statistics"
    )
    one, two = (own_model(federation, client).module.state_dict() for client in (0, 1))
    own = {name for name in one if name.startswith("body.") and not torch.equal(one[name], two[name])}
    expected = {f"body.1.{name}" for name in ("running_mean", "running_var")}
    assert expected <= own <= expected | {"body.1.num_batches_tracked"}
