"""FedMD (Li and Wang 2019) against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, named, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    PUBLIC,
    SEED,
    Toy,
    assert_same,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
)

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.datamodules.clients.splits import PublicSplit
from pfl_lightning.errors import ConfigurationError, InvalidMessageError
from pfl_lightning.methods import FedMD, LocalOnly
from pfl_lightning.methods._public import PublicUpdate
from pfl_lightning.seeding import derive_seed

LR, EPOCHS, DIGEST, SIZE, BATCH = 0.05, 2, 2, 8, 5
COHORTS = [[0, 2, 3], [1, 2], [0, 4, 2]]
DISTANCE = {"l1": lambda d: d.abs().mean(), "l2": lambda d: (d**2).mean()}
METHOD = partial(
    FedMD, lr=LR, epochs=EPOCHS, public_samples=SIZE, digest_epochs=DIGEST, public_batch_size=BATCH, norm="l1"
)


def drawn(seed, size, count=PUBLIC):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size]


def public(data, round):
    """Inputs of S_r."""
    return data.public_split.raw_inputs[drawn(derive_seed(SEED, "public", round), SIZE)]


def restate(data, encoders, norm="l1", warmup=0):
    """Everybody's network after the rounds."""
    first = []
    for index, make in enumerate(encoders):
        torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
        first.append(Net(make))
    nets = [copy_of(first[client % len(first)]) for client in range(CLIENTS)]
    consensus, begun = None, set()
    for round, cohort in enumerate(COHORTS):
        said = []
        for client in cohort:
            net, phase = nets[client], 0
            train = list(net.parameters())
            begins = warmup and client not in begun
            begun.add(client)
            if begins or consensus is not None:
                inputs, steps, generator = public(data, round), [], torch.Generator()
                generator.manual_seed(derive_seed(SEED, "fit/0", round, client))
                targets = drawn(derive_seed(SEED, "public", round), SIZE) % CLASSES if begins else consensus
                for _ in range(warmup if begins else DIGEST):
                    order = torch.randperm(SIZE, generator=generator)
                    steps += [[inputs[part], targets[part]] for part in order.split(BATCH)]
            if begins:
                sgd(net, steps, train, LR)  # by the public samples' classes
                sgd(net, batches(data, client, round, "fit/1", warmup), train, LR)
                phase = 2
            elif consensus is not None:
                sgd(net, steps, train, LR, lambda net, x, y: DISTANCE[norm](net(x) - y))  # digest
                phase = 1
            sgd(net, batches(data, client, round, f"fit/{phase}", EPOCHS), train, LR)  # revisit
            with torch.no_grad():
                said.append(net(public(data, round + 1)))
        consensus = torch.stack(said).mean(0)
    return nets


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("encoders", [[tiny_encoder], [tiny_encoder, linear_encoder]], ids=["one", "two"])
def test_rounds_equal_the_restatement(encoders, norm):
    data = Toy()
    federation = run(partial(METHOD, norm=norm), 3, cohorts=COHORTS, data=data, encoder=encoders)
    for client, net in enumerate(restate(data, encoders, norm)):
        assert_same(named(federation.client_model(client)), named(net), atol=1e-5)


@pytest.mark.parametrize(
    "engine", [None, VectorizedEngine(forward="vmap"), TrainerEngine()], ids=lambda engine: type(engine).__name__
)
def test_a_first_fit_begins_by_the_classes_of_public_samples(engine):
    data = Toy()
    federation = run(partial(METHOD, warmup_epochs=3), 3, cohorts=COHORTS, data=data, engine=engine)
    for client, net in enumerate(restate(data, [tiny_encoder], warmup=3)):
        model = federation.client_model(client)
        assert_same({n: p for n, p in named(model).items() if n != "begun"}, named(net), atol=1e-5)
    assert "begun" not in federation.models[0].exported_names()


def test_a_warm_up_needs_classes(monkeypatch):
    monkeypatch.setattr(PublicSplit, "classes", None)
    with pytest.raises(ConfigurationError, match="trains on the classes of public samples, and those of this data"):
        run(partial(METHOD, warmup_epochs=1), 1)


def test_samples_held_back_keep_their_classes_for_it():
    data = Digits(IID(5), public=30)
    data.setup()
    assert data.public_split.targets.tolist() == [-1] * 30
    some = data.public_split.select(torch.tensor([3, 4]))
    assert torch.equal(some.classes, data._loaded.samples.public_targets[[3, 4]])


def test_without_digest_it_is_local_training_bit_by_bit():
    federation = run(partial(METHOD, digest_epochs=0), 2, cohorts=COHORTS)
    local = run(partial(LocalOnly, lr=LR, epochs=EPOCHS), 2, cohorts=COHORTS)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), named(local.client_model(client)))


def test_of_one_client_the_target_is_its_own_score():
    """There is no gradient then, and with one batch an epoch the order of samples does not matter."""
    options = {"lr": LR, "epochs": EPOCHS, "weight_decay": 0.0}
    alone = {"cohorts": [[0]], "precision": "64-true"}
    data = [Toy([[0] * 6 + [1] * 5], batch_size=11) for _ in range(2)]
    federation = run(partial(METHOD, norm="l2", **options), 3, data=data[0], **alone)
    local = run(partial(LocalOnly, **options), 3, data=data[1], **alone)
    assert_same(named(federation.client_model(0)), named(local.client_model(0)), atol=1e-12)


def update(round=0, client=0, **changes):
    return PublicUpdate(
        client=client, round=round, **{"num_samples": 3, "scores": torch.ones(SIZE, CLASSES), **changes}
    )


def test_the_consensus_is_the_plain_mean_and_belongs_to_one_round():
    server = METHOD(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    assert server.broadcast(1, 0).targets is None
    server.receive(update(num_samples=1))
    server.receive(update(client=1, num_samples=99, scores=torch.full((SIZE, CLASSES), 4.0)))
    server.aggregate()
    assert torch.equal(server.broadcast(3, 1).targets, torch.full((SIZE, CLASSES), 2.5))
    sent = server.broadcast(3, 1).num_bytes
    assert sent == 4 * SIZE * CLASSES == update().num_bytes  # and no public sample
    server.aggregate()  # a round in which nobody sends
    assert server.broadcast(3, 2).targets is None


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.ones(SIZE, CLASSES + 1), r"scores has shape \(8, 6\), expected \(8, 5\)"),
        (torch.ones(SIZE - 1, CLASSES), r"scores has shape \(7, 5\), expected \(8, 5\)"),
        (torch.full((SIZE, CLASSES), float("nan")), "scores holds 40 non-finite values of 40"),
    ],
)
def test_scores_of_other_classes_or_samples_are_refused(scores, message):
    server = METHOD(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    with pytest.raises(InvalidMessageError, match=f"client 0, round 1: .*{message}"):
        server.check(update(scores=scores))


def test_data_without_enough_public_samples_are_refused():
    with pytest.raises(ConfigurationError, match="FedMD draws 8 public samples a round, and Digits has 0: set"):
        run(METHOD, data=Digits(IID(5)), encoder="mlp")
    with pytest.raises(ConfigurationError, match=r"FedMD draws 13 public samples a round, and .* has 12: set"):
        run(partial(METHOD, public_samples=13))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"public_samples": 0}, "public_samples must be at least 1"),
        ({"digest_epochs": -1}, "digest_epochs must be at least 0"),
        ({"public_batch_size": 0}, "public_batch_size must be at least 1"),
        ({"norm": "l3"}, "norm must be"),
        ({"warmup_epochs": -1}, "warmup_epochs must be at least 0"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedMD(tiny_encoder((6,)), CLASSES, **options)


def test_scores_are_those_of_the_evaluation_mode():
    """Batch normalization neither sees the next round's samples nor a last batch of one."""
    data = Toy(batch_size=9)
    options = {"cohorts": COHORTS, "encoder": normed_encoder}
    one = run(partial(METHOD, public_batch_size=7), 2, data=data, **options)
    assert one.server.consensus_round == 2
    said = [one.client_model(client).eval()(public(data, 2)) for client in COHORTS[1]]
    assert_same({"mean": one.server.consensus}, {"mean": torch.stack(said).mean(0).detach()}, atol=1e-6)
