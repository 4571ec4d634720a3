"""The examples run, and differ from plain Lightning projects by a few lines."""

import difflib
import importlib.util
from pathlib import Path

import lightning as L
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["text", "tabular"])
def test_a_federation_differs_by_five_lines_at_most(name):
    plain, federated = ((EXAMPLES / f"{kind}_{name}.py").read_text().splitlines() for kind in ("plain", "federated"))
    changed = [line for line in difflib.ndiff(plain, federated) if line[0] in "+-"]
    assert 0 < len(changed) <= 5
    assert any("federate(" in line or "FederatedLoop(" in line for line in changed)


@pytest.mark.parametrize(("name", "metric", "least"), [("text", "test_accuracy", 0.7), ("tabular", "test_acc", 0.85)])
@pytest.mark.parametrize("kind", ["plain", "federated"])
def test_it_runs_and_learns(tmp_path, monkeypatch, kind, name, metric, least):
    monkeypatch.chdir(tmp_path)
    tested = []
    test = L.Trainer.test

    def keep(self, *args, **kwargs):
        tested.append(test(self, *args, **kwargs))

    monkeypatch.setattr(L.Trainer, "test", keep)
    load(f"{kind}_{name}").main()
    assert tested[-1][0][metric] > least
    assert list(Path("runs").rglob("metrics.csv"))
