"""FedKD (Wu et al. 2022) against plain torch and numpy: two losses, two optimizers, singular values by hand."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from _helpers.plain import batches, copy_of, named, put, score
from _helpers.plain_partner import first_net, first_partner, own_nets, sgd_apart
from _helpers.toy import (
    CLASSES,
    CLIENTS,
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
from torch import nn
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError, InvalidMessageError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.methods import FedAvg, FedKD, LocalOnly
from pfl_lightning.methods.fedkd import EnergySchedule, FedKDUpdate

LR, EPOCHS, WEIGHT = 0.05, 2, 0.8
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(FedKD, lr=LR, epochs=EPOCHS, distillation=WEIGHT)
ENGINES = [TrainerEngine, partial(VectorizedEngine, forward="vmap")]
TEACHERS, STUDENT = [tiny_encoder, linear_encoder], wide_encoder


def losses(teacher, student, mapping, inputs, labels, detach=True):
    """Losses of the teacher, of the student, and of W_h."""
    held = torch.Tensor.detach if detach else lambda value: value
    h_t, h_s = teacher.encoder(inputs), student.encoder(inputs)
    t, s = teacher.head(h_t), student.head(h_s)
    ce_t, ce_s = F.cross_entropy(t, labels), F.cross_entropy(s, labels)
    divisor = held(ce_t + ce_s)
    p_t, p_s = t.softmax(1), s.softmax(1)
    mapped = h_s @ mapping.T

    def divergence(p, q):
        return (p * (p.log() - q.log())).sum() / len(p)

    of_teacher = ce_t + WEIGHT * (divergence(held(p_s), p_t) + ((h_t - held(mapped)) ** 2).mean()) / divisor
    of_student = ce_s + WEIGHT * (divergence(held(p_t), p_s) + ((held(h_t) - mapped) ** 2).mean()) / divisor
    if detach:
        return of_teacher, of_student, of_student
    return (of_teacher + of_student,) * 3


def truncated(tensor, energy):
    """By numpy, with the least rank; dense where factors are no smaller."""
    if tensor.ndim < 2:
        return tensor, tensor.numel()
    matrix = tensor.double().flatten(1).numpy()
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    rank = next(r for r in range(len(s) + 1) if (s[:r] ** 2).sum() >= energy * (s**2).sum())
    size = rank * (sum(matrix.shape) + 1)
    if size >= matrix.size:
        return tensor, matrix.size
    return torch.tensor((u[:, :rank] * s[:rank]) @ v[:rank]).reshape(tensor.shape), size


def restate(energies=(0.965, 0.98), detach=True, down=False):
    """The student, what everybody is evaluated with and W_h after the rounds, and the numbers that went up and down.

    It is the teacher; of a client that never trained, the student.
    """
    data, student, teachers, uploaded, downloaded = Toy(), first_partner(STUDENT), own_nets(TEACHERS), 0, 0
    size = sum(p.numel() for p in student.parameters())
    first_map = first_mapping()
    mappings = [nn.Parameter(first_map.clone()) for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        changes = []
        for client in cohort:
            local, teacher, mapping = copy_of(student), teachers[client], mappings[client]
            downloaded += size
            sgd_apart(
                batches(data, client, round, "fit/0", EPOCHS),
                partial(losses, teacher, local, mapping, detach=detach),
                [list(teacher.parameters()), list(local.parameters()), [mapping]],
                LR,
            )
            before = named(student)
            sent = {name: truncated(value - before[name], energies[round]) for name, value in named(local).items()}
            uploaded += sum(size for _, size in sent.values())
            changes.append({name: value.double() for name, (value, _) in sent.items()})
        mean = {name: sum(change[name] for change in changes) / len(changes) for name in changes[0]}
        put(student, {name: (value + mean[name]).float() for name, value in named(student).items()})
        if down:
            stored = {name: truncated(value, energies[round]) for name, value in named(student).items()}
            put(student, {name: value for name, (value, _) in stored.items()})
            size = sum(numbers for _, numbers in stored.values())
    evaluated = [net if client in chain(*COHORTS) else student for client, net in enumerate(teachers)]
    return student, evaluated, mappings, uploaded, downloaded


def first_mapping():
    """Drawn after the student."""
    first_net(STUDENT, "partner weights")  # leaves the generator behind the head
    return nn.Linear(7, 4, bias=False).weight.detach()


def own_part(model):
    return {name: p for name, p in named(model).items() if name.startswith(("encoder.", "head."))}


def sent(federation):
    return {name.removeprefix("partner."): t for name, t in federation.server.weights.as_state().items()}


@pytest.mark.parametrize("detach", [True, False])
def test_rounds_equal_the_restatement(detach):
    method, loop = partial(METHOD, partner=STUDENT, detach=detach), GivenCohorts(*COHORTS)
    federation = run(method, 2, loop=loop, encoder=TEACHERS)
    student, teachers, mappings, uploaded, downloaded = restate(detach=detach)
    assert_same(sent(federation), named(student), atol=1e-5)
    for client, net in enumerate(teachers):
        model = federation.client_model(client)
        assert_same(own_part(model), named(net), atol=1e-5)
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(net, Toy(), client, "test"), abs=1e-4)
        stored = federation.personal.get(client)["feature_map.weight"]
        torch.testing.assert_close(stored, mappings[client].detach(), rtol=0, atol=1e-5)
    assert loop.traffic.up == {"weights": 4 * uploaded}
    assert loop.traffic.down == {"weights": 4 * downloaded}
    assert uploaded < downloaded


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_the_same(engine):
    federation = run(partial(METHOD, partner=STUDENT), 2, cohorts=COHORTS, encoder=TEACHERS, engine=engine())
    student, teachers, *_ = restate()
    assert_same(sent(federation), named(student), atol=1e-5)
    for client, net in enumerate(teachers):
        assert_same(own_part(federation.client_model(client)), named(net), atol=1e-5)


def test_without_distillation_and_at_full_energy_students_are_those_of_fedavg_and_teachers_train_alone():
    options = {"lr": LR, "epochs": 1}
    full = {"distillation": 0.0, "energy_start": 1.0, "energy_end": 1.0, "by_samples": True}
    both = run(partial(FedKD, **options, **full), 2, cohorts=COHORTS)
    average = run(partial(FedAvg, **options), 2, cohorts=COHORTS)
    alone = run(partial(LocalOnly, **options), 2, cohorts=COHORTS)
    assert_same(sent(both), average.server.weights.as_state(), atol=1e-6)
    for client in chain(*COHORTS):
        assert_same(own_part(both.client_model(client)), named(alone.client_model(client)))


def test_no_loss_has_a_gradient_in_the_other_network():
    client = FedKD(tiny_encoder((INPUTS,)), CLASSES)
    client.attach_partner(wide_encoder((INPUTS,)))
    inputs, labels = Toy().tensors(0)
    terms = client.pair_terms(client.encoder(inputs), client.partner.encoder(inputs), labels)
    assert set(terms) == set(client.loss_names)
    own, others = [*client.encoder.parameters()], [*client.partner.encoder.parameters()]
    for name, term in terms.items():
        gradients = torch.autograd.grad(term, [*own, *others], allow_unused=True, retain_graph=True)
        has = [gradient is not None for gradient in gradients]
        expected = [not name.startswith("partner")] * len(own) + [name.startswith("partner")] * len(others)
        assert has == expected, name
    mapping = client.feature_map.weight
    reaches = {
        name: torch.autograd.grad(term, mapping, allow_unused=True, retain_graph=True)[0] is not None
        for name, term in terms.items()
    }
    assert [name for name, learned in reaches.items() if learned] == ["partner_features"]


def test_what_is_learned_by_heart_does_not_divide_by_zero():
    client = FedKD(tiny_encoder((INPUTS,)), CLASSES)
    with torch.no_grad():
        for head in (client.head, client.partner.head):
            head.bias.copy_(torch.tensor([1e4, 0, 0, 0, 0]))
    terms = client.training_step((torch.randn(3, INPUTS), torch.zeros(3, dtype=torch.int64)), 0)
    assert float(terms["cross_entropy"]) == 0
    assert torch.isfinite(terms["loss"])


def test_the_energy_rises_from_round_to_round():
    schedule = EnergySchedule(0.95, 0.98)
    found = [schedule.at(round, RunFacts(5, 3)) for round in range(3)]
    assert found == pytest.approx([0.96, 0.97, 0.98])
    assert schedule.at(7, RunFacts(5, None)) == 0.95
    assert EnergySchedule(0.9, 1.0).at(0, RunFacts(5, 1)) == 1.0


def test_downloads_in_low_rank():
    """Clients and server go on from the same student: the one that was sent, and the mean of the changes."""
    loop, low = GivenCohorts(*COHORTS), {"energy_start": 0.6, "energy_end": 0.6}
    method = partial(METHOD, partner=STUDENT, compress_down=True, **low)
    federation = run(method, 2, loop=loop, encoder=TEACHERS)
    student, teachers, _, uploaded, downloaded = restate(energies=(0.6, 0.6), down=True)
    assert "partner.encoder.0.weight:left" in federation.server.broadcast(0, 2).weights
    for model in federation.models:
        model.receive(federation.server.broadcast(0, 2))
        got = {name.removeprefix("partner."): t for name, t in named(model, "partner.").items()}
        assert_same(got, named(student), atol=1e-5)
    for client, net in enumerate(teachers):
        assert_same(own_part(federation.client_model(client)), named(net), atol=1e-5)
    assert loop.traffic.up == {"weights": 4 * uploaded}
    assert loop.traffic.down == {"weights": 4 * downloaded}  # the first weights as they are


def test_batch_normalization_travels_with_the_student():
    data = Toy(batch_size=9)
    options = {"energy_start": 1.0, "energy_end": 1.0, "by_samples": True, "distillation": 0.0}
    both = run(partial(FedKD, lr=LR, epochs=1, **options), 2, data=data, encoder=normed_encoder)
    average = run(partial(FedAvg, lr=LR, epochs=1), 2, data=Toy(batch_size=9), encoder=normed_encoder)
    assert_same(sent(both), average.server.weights.as_state(), atol=1e-5)


def test_what_is_handed_out_is_the_teacher():
    client = run(partial(METHOD, partner=STUDENT), 1).models[0]
    assert all(name.startswith(("encoder.", "head.")) for name in client.exported_names())
    assert "feature_map.weight" in client.personal_names()


def test_a_change_of_other_tensors_is_refused():
    server = run(partial(METHOD, partner=STUDENT), 1).server
    update = FedKDUpdate(client=2, round=1, num_samples=3, change={"partner.head.bias": torch.ones(5)})
    with pytest.raises(InvalidMessageError, match=r"FedKDUpdate\.change: compressed tensors: missing \['partner\."):
        server.receive(update)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"energy_start": 1.1}, "energy_start must be between 0 and 1, got 1.1"),
        ({"energy_start": 0.9, "energy_end": 0.8}, "energy_end must be at least energy_start, .* got 0.8 after 0.9"),
        ({"energy_end": 0.0}, "energy_end, the share of the squared norm .* above 0"),
        ({"distillation": -1.0}, "distillation must be"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedKD(tiny_encoder((INPUTS,)), CLASSES, **options)


def test_a_student_without_the_width_that_it_says_is_refused():
    def wrong(input_shape):
        encoder = wide_encoder(input_shape)
        encoder.out_features = 3
        return encoder

    with pytest.raises(ConfigurationError, match=r"of the partner \(.*wrong\) must map inputs .* it gives \(2, 7\)"):
        run(partial(METHOD, partner=wrong), 1)
