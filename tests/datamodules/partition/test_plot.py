"""Pictures and tables of partitions."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from pfl_lightning.datamodules import partition_table, plot_partition


def counts_of(clients, classes):
    return np.random.default_rng(0).integers(0, 50, (clients, classes)) * (np.arange(classes) % 2)


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (100, 100), (1000, 300)])
def test_a_picture_of_any_size(tmp_path, clients, classes):
    path = tmp_path / "new" / "partition.png"
    plot_partition(counts_of(clients, classes), [f"name {c}" for c in range(classes)], path)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert 300 < picture.width < 3000
        assert 300 < picture.height < 3000


def text_of(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_a_table_with_a_column_for_each_class():
    text = text_of(partition_table(np.array([[3, 0], [1, 41]]), ["ant", "bee"]))
    assert "2 clients, 2 classes" in text
    assert "ant" in text
    assert "42" in text


def test_further_sizes_have_columns():
    evaluated = {"validation": np.array([5, 6]), "test": np.array([7, 8])}
    found = partition_table(np.array([[3, 0], [1, 41]]), ["ant", "bee"], evaluated=evaluated, unlabeled=np.ones(2))
    lines = [line.split() for line in text_of(found).splitlines()]
    assert ["client", "samples", "validation", "test", "unlabeled", "ant", "bee"] in lines
    assert ["1", "42", "6", "8", "1", "1", "41"] in lines


def test_a_long_table_is_cut_and_many_classes_are_summed_up():
    counts = counts_of(50, 30)
    text = text_of(partition_table(counts, [f"n{c}" for c in range(30)], max_clients=5))
    assert "+45" in text
    assert "most frequent" in text
    assert "more" in text


def test_the_groups_of_the_clients_are_shown(tmp_path):
    counts = np.array([[3, 0], [1, 41]])
    text = text_of(partition_table(counts, ["ant", "bee"], groups=["photo", "art, 90°"]))
    assert "group" in text
    assert "art, 90°" in text
    plot_partition(counts, ["ant", "bee"], tmp_path / "a.png", groups=["photo", ""])
    assert (tmp_path / "a.png").exists()
    for draw in (partition_table, lambda *options, groups: plot_partition(*options, tmp_path / "b.png", groups)):
        with pytest.raises(ValueError, match="expected a group for each of 2 clients, got 1"):
            draw(counts, ["ant", "bee"], groups=["photo"])


def test_names_are_shown_as_they_are(tmp_path):
    names, groups = ["[red]", "a[/b]", "US$_", "b$_$"], ["[x]", "y$_$"]
    console = Console(file=io.StringIO(), width=120)
    counts = np.arange(8).reshape(2, 4)
    for most in (16, 2):
        console.print(partition_table(counts, names, groups=groups, max_classes=most))
    shown = console.file.getvalue()
    assert all(name in shown for name in (*names, *groups))
    plot_partition(counts, names, tmp_path / "partition.png", groups)


def test_shapes_must_fit(tmp_path):
    with pytest.raises(ValueError, match=r"\(clients, 3 classes\), got \(2, 2\)"):
        plot_partition(np.zeros((2, 2), int), ["a", "b", "c"], tmp_path / "a.png")
