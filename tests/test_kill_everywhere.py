"""Runs that are killed before each of their file operations in turn, and resumed: nothing is lost, nothing differs.

``pytest -m slow tests/test_kill_everywhere.py``
"""

import json

import pytest
import torch
from _helpers.kill_at import run_in_process
from _helpers.results import without_seconds

from pfl_lightning.runs.folder import RunFolder

STRIDES = {"sequential": 1, "vectorized": 3, "trainer": 3, "ray": 12}
"""One operation of so many is tried under an engine: they are the same ones, and Ray takes its time to start."""

FURTHER = {"pfedhn": 8, "fedfomo": 8}
"""Configs of the digits whose servers keep more than FedPAC's, sequentially: one that learns, with its optimizer, and
one with models of clients, of which it sends a bank; and the strides."""


def arguments(folder, engine, method="fedpac"):
    options = {
        "config": f"configs/{method}_digits.yaml",
        "run_dir": folder,
        "engine": engine,
        "model.encoder": "mlp",
        "model.method.init_args.epochs": 1,
        "data.init_args.partition.init_args.num_clients": 3,
        "data.init_args.partition.init_args.samples_per_client": 30,
        "trainer.max_epochs": 3,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    return ["fit", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]


def content(folder):
    """Everything of the last run that a user may look at, without times and paths."""
    run = RunFolder(folder).versions()[-1]
    names = sorted(path.name for path in run.rglob("*") if path.is_file() and "tfevents" not in path.name)
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    best = torch.load(next((run / "checkpoints").glob("best*")), weights_only=True)
    results = without_seconds(json.loads((run / "results.json").read_text()))
    tables = [(run / name).read_text() for name in ("clients.csv", "config.yaml")]
    names = [name for name in names if not name.startswith("config-resumed")]
    return names, results, tables[0], list(leaves(state["state_dict"])), list(leaves(best["state_dict"]))


def leaves(state):
    for name, value in sorted(state.items()):
        if isinstance(value, dict):
            yield from leaves(value)
        elif isinstance(value, torch.Tensor):
            yield name, value


def assert_same(got, expected):
    assert got[:3] == expected[:3]
    for own, other in zip(got[3:], expected[3:], strict=True):
        assert [name for name, _ in own] == [name for name, _ in other]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "engine", "stride"),
    [
        *(pytest.param("fedpac", engine, stride, id=engine) for engine, stride in STRIDES.items()),
        *(pytest.param(method, "sequential", stride, id=method) for method, stride in FURTHER.items()),
    ],
)
def test_killed_before_every_file_operation(tmp_path, method, engine, stride, capsys):
    exit_code, operations = run_in_process(arguments(tmp_path / "whole", engine, method), tmp_path / "whole")
    assert exit_code == 0
    assert len(operations) > 20
    expected = content(tmp_path / "whole")
    places = range(0, len(operations), stride)
    for place in places:
        folder = tmp_path / f"killed-{place}"
        killed, begun = run_in_process(arguments(folder, engine, method), folder, place)
        assert killed == -9, begun
        runs = RunFolder(folder).versions()
        saved = bool(runs) and (runs[-1] / "checkpoints" / "last.ckpt").is_file()
        resume = ["--ckpt_path", "last"] if saved else []
        resumed, _ = run_in_process([*arguments(folder, engine, method), *resume], folder)
        where = f"killed at operation {place}, {begun[-1]}"
        assert resumed == 0, where
        try:
            assert_same(content(folder), expected)
        except (AssertionError, OSError, StopIteration) as error:
            raise AssertionError(where) from error
    with capsys.disabled():
        print(f"\n{method}, {engine}: killed before {len(places)} of {len(operations)} operations")
