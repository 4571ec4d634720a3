"""The comparison of two checkouts sees what differs between the values that they leave."""

import sys
from pathlib import Path

import pytest
import torch

GATE = Path(__file__).parents[2] / "benchmarks" / "gate"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(GATE))
    for name in ("cases", "compare"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import compare

    return compare


def left(**changes):
    return {"last.ckpt.weight": torch.tensor([1.0, float("nan")]), "results.accuracy": 0.5, "rows.0": "3"} | changes


def folder_of(path, name="sequential--fedavg.pt", **changes):
    path.mkdir()
    torch.save(left(**changes), path / name)
    return path


def test_equal_values_pass(compare, tmp_path, capsys):
    assert compare.compare_folders(folder_of(tmp_path / "a"), folder_of(tmp_path / "b")) == (1, 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("last.ckpt.weight", torch.tensor([1.0000001, float("nan")])),
        ("last.ckpt.weight", torch.tensor([1.0, float("nan")], dtype=torch.float64)),
        ("results.accuracy", 0.50000001),
        ("rows.0", "3.0"),
        ("new", None),
    ],
)
def test_one_bit_is_seen(compare, tmp_path, capsys, name, changed):
    found = compare.compare_folders(folder_of(tmp_path / "a"), folder_of(tmp_path / "b", **{name: changed}))
    assert found == (1, 1)
    assert name in capsys.readouterr().out


def test_vectorized_runs_may_differ_by_rounding(compare, tmp_path):
    file = "vectorized--fedavg.pt"
    near = {"last.ckpt.weight": torch.tensor([1.00001, float("nan")]), "rows.0": "3.00001"}
    assert compare.compare_folders(folder_of(tmp_path / "a", file), folder_of(tmp_path / "b", file, **near)) == (1, 0)
    far = {"last.ckpt.weight": torch.tensor([1.1, float("nan")])}
    assert compare.compare_folders(tmp_path / "a", folder_of(tmp_path / "c", file, **far)) == (1, 1)


def test_cases_that_run_in_one_checkout_alone_differ(compare, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    assert compare.compare_folders(folder_of(tmp_path / "a"), tmp_path / "b") == (1, 1)
    assert "runs only before" in capsys.readouterr().out


def test_nested_values_are_named_without_times(compare):
    from cases import flat

    packed = {"loops": [{"weight": torch.ones(2)}, 3], "seconds": 0.2, "dirpath": "/a", "name": None}
    found = flat(packed)
    assert list(found) == ["loops.0.weight", "loops.1", "name"]
    assert torch.equal(found["loops.0.weight"], torch.ones(2))
