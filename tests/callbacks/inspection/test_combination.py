"""Aggregation weights between clients, read back from the event files."""

import warnings
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.events import assert_drawn, board, charts, events, picture, rounds, scalars
from _helpers.toy import run

from pfl_lightning import AggregationWeights
from pfl_lightning.callbacks import CombinationWeights
from pfl_lightning.callbacks.inspection.combination import ClientGroups, draw_weights, group_clients
from pfl_lightning.methods import FedAvg, FedPAC

COHORTS = ([0, 1, 4], [1, 2, 3, 4])


class _Watch(L.Callback):
    def __init__(self):
        self.seen = {}

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen[trainer.current_epoch] = pl_module.server.aggregation_weights


def play(tmp_path, **options):
    watch = _Watch()
    callbacks = [CombinationWeights(2), watch]
    run(partial(FedPAC, epochs=1), 5, cohorts=COHORTS, callbacks=callbacks, logger=board(tmp_path), **options)
    return events(tmp_path), watch.seen


def test_a_heat_map_of_the_cohorts_weights(tmp_path):
    found, seen = play(tmp_path)
    assert rounds(found, "combination_weights") == [0, 1, 3, 4]
    for round in (0, 1):
        assert_drawn(picture(found, "combination_weights", round))
    assert [weights.clients for weights in seen.values()] == [tuple(COHORTS[r % 2]) for r in range(5)]


def test_scalars_own_weight_and_effective_number_of_clients(tmp_path):
    found, seen = play(tmp_path)
    own, number = {}, {}
    for round, weights in seen.items():
        rows = weights.weights.tolist()
        own[round] = np.mean([row[i] for i, row in enumerate(rows)])
        number[round] = np.mean([1 / sum(a * a for a in row) for row in rows])
    assert scalars(found, "combination/own") == pytest.approx(own)
    assert scalars(found, "combination/clients") == pytest.approx(number)
    assert all(1 <= value <= 4 for value in number.values())
    assert ("combination", "clients in a head") in charts(found)


def test_scalar_of_the_weights_within_a_group(tmp_path):
    class Grouped(CombinationWeights):
        def before_fit(self, trainer, federation):
            self._groups = ClientGroups(("even", "odd"), np.array([0, 1, 0, 1, 0]))

    watch = _Watch()
    callbacks = [Grouped(), watch]
    run(partial(FedPAC, epochs=1), 2, cohorts=COHORTS, callbacks=callbacks, logger=board(tmp_path))
    expected = {}
    for round, weights in watch.seen.items():
        pairs = [(i, j) for i in weights.clients for j in weights.clients if (i - j) % 2 == 0]
        place = {client: row for row, client in enumerate(weights.clients)}
        expected[round] = sum(float(weights.weights[place[i], place[j]]) for i, j in pairs) / len(weights.clients)
    assert scalars(events(tmp_path), "combination/group") == pytest.approx(expected)


def test_clients_of_a_group_are_neighbors():
    weights = torch.arange(16.0).reshape(4, 4) / 100
    groups = ClientGroups(("a", "b", "c"), np.array([1, 0, 2, 0, 1, 0]))
    figure = draw_weights(AggregationWeights((0, 1, 4, 5), weights), groups, 7)
    axes = figure.axes[0]
    [image] = axes.images
    order = [1, 3, 0, 2]  # clients 1 and 5 of group a, then 0 and 4 of group b
    expected = [[float(weights[i, j]) for j in order] for i in order]
    np.testing.assert_allclose(image.get_array(), expected)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "5", "0", "4"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "5", "0", "4"]
    [above] = axes.child_axes
    assert [label.get_text() for label in above.get_xticklabels()] == ["a", "b"]
    assert above.get_xticks().tolist() == [0.5, 2.5]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_xdata()[0] == line.get_xdata()[1]] == [1.5]


def test_a_large_cohort_can_be_drawn():
    weights = torch.full((300, 300), 1 / 300)
    groups = ClientGroups(("",), np.zeros(300, dtype=np.int64))
    assert len(draw_weights(AggregationWeights(tuple(range(300)), weights), groups, 0).axes[0].get_xticks()) <= 40


def test_a_method_without_combination_is_named_once(tmp_path):
    methods = {"FedAvg": FedAvg, "FedPAC": partial(FedPAC, combination=False)}
    for version, (name, method) in enumerate(methods.items()):
        with pytest.warns(UserWarning, match=f"CombinationWeights shows nothing: {name}'s server has no") as said:
            run(partial(method, epochs=1), 2, callbacks=[CombinationWeights(1)], logger=board(tmp_path, version))
        assert sum("CombinationWeights" in str(one.message) for one in said) == 1
        found = events(tmp_path, version)
        assert not found.Tags()["images"]
        assert ("combination", "clients in a head") not in charts(found)


def test_an_optional_one_is_silent(tmp_path):
    callback = CombinationWeights(1)
    callback.optional = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(partial(FedAvg, epochs=1), 1, callbacks=[callback])
    assert not [one for one in said if "CombinationWeights" in str(one.message)]


# ---------------------------------------------------------------------- groups


def test_groups_are_clients_of_the_same_dominant_classes():
    dominant = [[9, 8, 1, 1], [1, 1, 7, 9], [9, 9, 2, 0], [0, 2, 4, 5], [8, 5, 2, 1], [1, 0, 3, 3]]
    groups = group_clients(np.array(dominant), ["ant", "bee", "cat", "dog"])
    assert groups.names == ("ant bee", "cat dog")
    assert groups.group_of.tolist() == [0, 1, 0, 1, 0, 1]
    assert groups.order([5, 0, 3, 2]) == [1, 3, 2, 0]  # clients 0, 2; 3, 5


def test_groups_by_design_come_first():
    counts = np.full((4, 2), 5)
    groups = group_clients(counts, ["ant", "bee"], ["90°", "", "90°", ""])
    assert groups.names == ("90°", "")
    assert groups.group_of.tolist() == [0, 1, 0, 1]
    alone = np.eye(4, dtype=np.int64)  # everyone has a class of its own: the design alone makes groups
    assert group_clients(alone, list("abcd"), ["x", "x", "y", "y"]).names == ("x", "y")


@pytest.mark.parametrize("counts", [np.full((4, 3), 5), np.eye(4, dtype=np.int64), np.zeros((3, 2), dtype=np.int64)])
def test_without_anything_in_common_or_apart_there_is_one_group(counts):
    groups = group_clients(counts, list("abcd")[: counts.shape[1]])
    assert groups.names == ("",)
    assert set(groups.group_of.tolist()) == {0}
