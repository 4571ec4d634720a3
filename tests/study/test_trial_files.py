"""What a search writes down of its trials."""

import json

import pytest

from pfl_lightning.study.definition.study import Dimension
from pfl_lightning.study.trials import TriedOptions, bound_notes, write_json, write_table


@pytest.mark.parametrize(
    ("tried", "value", "end"),
    [
        (Dimension(low=1e-4, high=1.0, log=True), 0.8, "upper"),
        (Dimension(low=1e-4, high=1.0, log=True), 0.1, ""),
        (Dimension(low=1e-4, high=1.0, log=True), 1.3e-4, "lower"),
        (Dimension(low=0.0, high=1.0), 0.5, ""),
        (Dimension(low=0.0, high=1.0), 0.0, "lower"),
        (Dimension(low=1, high=3, integer=True), 2, ""),
        (Dimension(low=1, high=3, integer=True), 3, "upper"),
        (Dimension(choices=(0.1, 1.0, 0.01)), 1.0, "upper"),
        (Dimension(choices=(0.1, 1.0, 0.01)), 0.1, ""),
        (Dimension(choices=(0.1, 1.0, 0.01)), 0.01, "lower"),
        (Dimension(choices=("mlp", ["mlp", "small_cnn"])), "mlp", ""),
        (Dimension(choices=(True, False)), True, ""),
        (Dimension(choices=(None, 0.1)), 0.1, ""),
        (Dimension(choices=(0.1,)), 0.1, ""),
    ],
)
def test_a_chosen_value_at_an_end_of_what_was_tried_is_told(tried, value, end):
    notes = bound_notes({"lr": value}, {"lr": tried})
    assert [f"is at the {end} end of what was tried" in note for note in notes] == [True] * bool(end)


def test_the_table_says_it_below_the_trials(tmp_path):
    space = {"a.lr": Dimension(choices=(0.1, 1.0)), "a.name": Dimension(choices=("x", "y"))}
    rows = [
        TriedOptions(0, "complete", 0.5, {"a.lr": 0.1, "a.name": "x"}, 8),
        TriedOptions(1, "complete", 0.75, {"a.lr": 1.0, "a.name": "y"}, 8),
    ]
    write_table(tmp_path / "search.md", rows[1], rows, space)
    lines = (tmp_path / "search.md").read_text().splitlines()
    assert lines[4:6] == ["| 1 | 1 | y | 75.00 | 8 | chosen |", "| 0 | 0.1 | x | 50.00 | 8 |  |"]
    assert lines[6:] == ["", "- a.lr: 1 is at the upper end of what was tried; values above it may be better."]
    write_json(tmp_path / "search.json", rows[1], rows)
    assert json.loads((tmp_path / "search.json").read_text())["best"]["options"] == {"a.lr": 1.0, "a.name": "y"}
