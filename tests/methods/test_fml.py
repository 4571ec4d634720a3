"""FML (Shen et al. 2020) against plain torch: two networks, two losses, two optimizers."""

from functools import partial
from itertools import chain

import pytest
import torch
from _helpers.plain import batches, copy_of, mean_of, named, put, score
from _helpers.plain_partner import first_partner, own_nets, sgd_apart
from _helpers.toy import (
    CLASSES,
    INPUTS,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    wide_encoder,
)

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.methods import FML, FedAvg, LocalOnly

LR, EPOCHS, ALPHA, BETA = 0.05, 2, 0.3, 0.8
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(FML, lr=LR, epochs=EPOCHS, alpha=ALPHA, beta=BETA)
ENGINES = [TrainerEngine, partial(VectorizedEngine, forward="vmap")]


def divergence(p, q):
    """KL(p || q), sample by sample and class by class."""
    values = [sum(a * (a / b).log() for a, b in zip(one, other, strict=True)) for one, other in zip(p, q, strict=True)]
    return sum(values) / len(values)


def losses(personal, meme, inputs, labels):
    p, q = personal(inputs).softmax(1), meme(inputs).softmax(1)
    labeled = [-probability[range(len(labels)), labels].log().mean() for probability in (p, q)]
    return (
        ALPHA * labeled[0] + (1 - ALPHA) * divergence(q.detach(), p),
        BETA * labeled[1] + (1 - BETA) * divergence(p.detach(), q),
    )


def restate(encoders, meme_encoder, by_samples=False):
    """The meme after the rounds, and the network that everybody is evaluated with: who never trained has the meme."""
    data, meme, personal = Toy(), first_partner(meme_encoder), own_nets(encoders)
    for round, cohort in enumerate(COHORTS):
        uploads = []
        for client in cohort:
            own, local = personal[client], copy_of(meme)
            sgd_apart(
                batches(data, client, round, "fit/0", EPOCHS),
                partial(losses, own, local),
                [list(own.parameters()), list(local.parameters())],
                LR,
            )
            uploads.append(named(local))
        put(meme, mean_of(uploads, [len(data.labels[client]) if by_samples else 1 for client in cohort]))
    return meme, [net if client in chain(*COHORTS) else meme for client, net in enumerate(personal)]


def own_part(model):
    return {name: p for name, p in named(model).items() if not name.startswith("partner.")}


def sent(federation):
    return {name.removeprefix("partner."): t for name, t in federation.server.weights.as_state().items()}


@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize(
    ("encoders", "meme"), [([tiny_encoder], linear_encoder), ([tiny_encoder, linear_encoder], wide_encoder)]
)
def test_rounds_equal_the_restatement(encoders, meme, by_samples):
    method = partial(METHOD, partner=meme, by_samples=by_samples)
    federation = run(method, 2, cohorts=COHORTS, encoder=encoders)
    expected, personal = restate(encoders, meme, by_samples)
    assert_same(sent(federation), named(expected), atol=1e-6)
    for client, net in enumerate(personal):
        assert_same(own_part(federation.client_model(client)), named(net), atol=1e-6)
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(net, Toy(), client, "test"), abs=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_the_same(engine):
    encoders = [tiny_encoder, linear_encoder]
    federation = run(partial(METHOD, partner=wide_encoder), 2, cohorts=COHORTS, encoder=encoders, engine=engine())
    expected, personal = restate(encoders, wide_encoder)
    assert_same(sent(federation), named(expected), atol=1e-5)
    for client, net in enumerate(personal):
        assert_same(own_part(federation.client_model(client)), named(net), atol=1e-5)


def test_from_labels_alone_memes_are_those_of_fedavg_and_personal_networks_train_alone():
    options = {"lr": LR, "epochs": 1}
    method = partial(FML, **options, alpha=1.0, beta=1.0, by_samples=True)
    both = run(method, 2, cohorts=COHORTS)
    average = run(partial(FedAvg, **options), 2, cohorts=COHORTS)
    alone = run(partial(LocalOnly, **options), 2, cohorts=COHORTS)
    assert_same(sent(both), average.server.weights.as_state())
    for client in chain(*COHORTS):
        assert_same(own_part(both.client_model(client)), named(alone.client_model(client)))


def test_equal_networks_do_not_teach_each_other():
    client = FML(tiny_encoder((INPUTS,)), CLASSES)
    inputs, labels = Toy().tensors(0)
    terms = client.training_step((inputs, labels), 0)
    assert float(terms["mutual"]) == float(terms["partner_mutual"]) == 0
    assert torch.equal(terms["cross_entropy"], terms["partner_cross_entropy"])


def test_no_loss_has_a_gradient_in_the_other_network():
    client = FML(tiny_encoder((INPUTS,)), CLASSES)
    client.attach_partner(wide_encoder((INPUTS,)))
    inputs, labels = Toy().tensors(0)
    terms = client.pair_terms(client.encoder(inputs), client.partner.encoder(inputs), labels)
    own = [*client.encoder.parameters(), *client.head.parameters()]
    for name, term in terms.items():
        mine, others = (own, [*client.partner.parameters()])[:: -1 if name.startswith("partner") else 1]
        gradients = torch.autograd.grad(term, [*mine, *others], allow_unused=True, retain_graph=True)
        assert all(gradient is not None and gradient.any() for gradient in gradients[: len(mine)]), name
        assert all(gradient is None for gradient in gradients[len(mine) :]), name


def test_only_memes_travel():
    loop = GivenCohorts([0, 1])
    run(partial(METHOD, partner=wide_encoder), 1, loop=loop, limit_val_batches=0)
    size = 4 * ((INPUTS + 1) * 7 + (7 + 1) * CLASSES)
    assert loop.traffic.up == loop.traffic.down == {"weights": 2 * size}


def test_batch_normalization_is_personal_in_the_personal_network():
    client = FML(normed_encoder((INPUTS,)), CLASSES)
    assert "partner.encoder.1.running_mean" in client.shared_names()
    assert "encoder.1.running_mean" in client.personal_names()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha must be"),
        ({"alpha": 1.5}, "alpha must be between 0 and 1"),
        ({"beta": float("nan")}, "beta must be"),
        ({"beta": 2}, "beta must be between 0 and 1"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FML(tiny_encoder((INPUTS,)), CLASSES, **options)
