"""Ranks of feature units, read back from the event files and computed again from the clients' models."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from _helpers.events import assert_drawn, board, charts, events, picture, rounds, scalars
from _helpers.toy import CLIENTS, Toy, for_toy, linear_encoder, run, tiny_encoder, wide_encoder
from scipy import stats
from torch.utils.data import TensorDataset

from pfl_lightning.callbacks import FederatedLoop, RepresentationMeasures, UnitAttribution
from pfl_lightning.callbacks.inspection.attribution import Attribution, draw_attribution
from pfl_lightning.callbacks.inspection.probe import Probe
from pfl_lightning.datamodules import IID, ConceptShift, FromDatasets
from pfl_lightning.methods import PFLSSL, FedClassAvg, FedPer, FedProto, LocalOnly

QUICK = partial(FedClassAvg, epochs=2, lr=0.02, contrastive=False)
ENCODERS = [tiny_encoder, linear_encoder]


def test_ranks_of_the_sample_that_most_clients_know(tmp_path):
    data = Toy()
    callback = UnitAttribution(2, samples=10)
    federation = run(QUICK, 3, callbacks=[callback], logger=board(tmp_path), data=data, encoder=ENCODERS)
    found = events(tmp_path)
    assert rounds(found, "attribution_ranks") == [0, 1, 2]
    assert_drawn(picture(found, "attribution_ranks", 2))
    models = [federation.client_model(client).eval() for client in range(CLIENTS)]
    got = callback.attribute(federation)
    inputs, labels = callback.probe.common_samples(federation, 10)
    with torch.no_grad():
        right = np.array([(model(inputs).argmax(1) == labels).numpy() for model in models])
        sample = int(right.sum(axis=0).argmax())
        assert got.clients == tuple(np.flatnonzero(right[:, sample]).tolist())
        assert got.label == int(labels[sample])
        rows = []
        for client in got.clients:  # the head is ReLU and linear: weight times the change of the unit behind the ReLU
            model = models[client]
            x = inputs[sample : sample + 1]
            change = (model.encoder(x).relu() - model.encoder(torch.zeros_like(x)).relu())[0]
            rows.append((model.head.weight[got.label] * change).numpy())
    np.testing.assert_allclose(got.conductance.numpy(), rows, atol=2e-2)  # the ReLU's bend lies between two steps
    assert len(rows) > 1
    pairs = [stats.spearmanr(got.conductance[i], got.conductance[j])[0] for i in range(len(rows)) for j in range(i)]
    assert scalars(found, "attribution/rank_correlation")[2] == pytest.approx(np.mean(pairs), abs=1e-6)
    assert scalars(found, "attribution/clients")[2] == len(rows)
    assert ("representations", "rank correlation of units between clients") in charts(found)


def test_the_picture_has_a_column_for_each_client():
    values = torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 9.0]])
    axes = draw_attribution(Attribution(1, (4, 6), values), "bee", 0).axes[0]
    [image] = axes.images
    np.testing.assert_allclose(image.get_array(), [[1.0, 0.25], [0.0, 0.25], [0.5, 1.0]])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "6"]


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (
            LocalOnly,
            {"encoder": [tiny_encoder, wide_encoder]},
            r"several widths: 4 \(tiny_encoder\), 7 \(wide_encoder\)",
        ),
        (FedProto, {}, "FedProto does not classify by a head"),
        (for_toy(PFLSSL), {"data": Toy(augment=False)}, "PFLSSL does not classify by a head"),
        (FedPer, {"data": Toy(validation=0)}, "no client has samples in its validation split"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*compares 2 augmented views")
def test_what_has_no_units_to_compare_is_named(tmp_path, method, options, reason):
    with pytest.warns(UserWarning, match=f"UnitAttribution shows nothing: .*{reason}"):
        run(
            partial(method, epochs=1),
            1,
            callbacks=[UnitAttribution(1, part="validation")],
            logger=board(tmp_path),
            **options,
        )
    assert not events(tmp_path).Tags()["images"]


def test_no_sample_is_classified_correctly(tmp_path):
    class Wrong(FedPer):
        def classify(self, features):
            return super().classify(features) * 0 + torch.tensor([0.0] * 4 + [1.0])  # always class 4

    options = {"cohorts": [[0, 1, 2]], "data": Toy([[0, 1] * 4] * 3)}
    run(partial(Wrong, epochs=1), callbacks=[UnitAttribution(1)], logger=board(tmp_path), **options)
    found = events(tmp_path)
    assert not found.Tags()["images"]
    assert not [tag for tag in found.Tags()["scalars"] if "attribution" in tag]


def test_a_client_with_nan_is_not_right():
    callback = UnitAttribution(1)
    federation = run(partial(FedPer, epochs=1), callbacks=[callback], data=Toy([[0, 1] * 4] * 3), cohorts=[[0, 1, 2]])
    assert len(callback.attribute(federation).clients) > 0
    for client in range(3):
        head = {name: value * np.nan for name, value in federation.personal.get(client).items()}
        federation.personal.set(client, head)  # whose greatest score, that of class 0, is NaN
    assert callback.attribute(federation) is None


class Tokens(torch.nn.Module):
    """Reads whole numbers."""

    def __init__(self, input_shape):
        super().__init__()
        self.table, self.out_features = torch.nn.Embedding(20, 4), 4

    def forward(self, inputs):
        return self.table(inputs).mean(1)


class TokenData(Toy):
    """The toy data as words."""

    def load(self):
        samples = super().load()
        words = {n: getattr(samples, n).mul(3).long() % 20 for n in ("train_inputs", "test_inputs")}
        return dataclasses.replace(samples, **words)


def test_whole_numbers_have_no_line_between_them(tmp_path):
    callback = UnitAttribution(dirpath=str(tmp_path))
    with pytest.warns(UserWarning, match="UnitAttribution shows nothing: inputs are whole numbers"):
        run(partial(FedPer, epochs=1), callbacks=[callback], data=TokenData(), encoder=Tokens)


def test_samples_of_different_shapes_are_not_shown_to_all(tmp_path, monkeypatch):
    own = Probe.samples

    def wider(self, federation, client):
        inputs, labels = own(self, federation, client)
        return (torch.cat([inputs, inputs], dim=1) if client == 2 else inputs), labels

    monkeypatch.setattr(Probe, "samples", wider)
    for callback in (UnitAttribution, RepresentationMeasures):
        with pytest.warns(UserWarning, match=r"differ in shape: \(6,\) \(client \d\), \(12,\) \(client 2\)"):
            run(partial(FedPer, epochs=1), callbacks=[callback(dirpath=str(tmp_path))])


def test_under_a_concept_shift_a_client_is_right_by_its_own_labels(tmp_path):
    inputs = torch.randn(900, 6, generator=torch.Generator().manual_seed(0))
    train = TensorDataset(inputs, inputs[:, :3].argmax(1))
    rule = ConceptShift(IID(4), permutations=[[0, 1, 2], [1, 2, 0]])
    callback = UnitAttribution(dirpath=str(tmp_path))
    data = FromDatasets(rule, batch_size=10, train=train)
    federation = run(partial(FedPer, lr=0.2, epochs=3), 6, callbacks=[callback], data=data, loop=FederatedLoop())
    assert min(score.accuracy for score in federation.test_scores.values()) > 0.8
    inputs, labels = callback.probe.common_samples(federation, 50)
    for client, model in federation.client_models(range(4)):  # two of either order
        assert callback._correct(federation, client, model, inputs, labels).float().mean() > 0.8
    assert callback.attribute(federation).clients == (0, 1, 2, 3)
