"""A file of a run that was cut anywhere: the same figures, or an error that names it; never others in silence."""

import json
import math
import warnings

import pytest
from _helpers.finished import summary, write_personalized, write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pfl_lightning.cli import main
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.reading import read_run
from pfl_lightning.runs.results import client_accuracies

CONFIG = {"model": {"method": "FedAvg"}, "trainer": {"max_epochs": 2}}
CHANGE = {"option": "model.method.init_args.lr", "before": 0.1, "now": 0.2, "known": True}


def whole_run(folder):
    run = write_run(folder, clients=(0.125, 0.5, 0.75, 1.0), config=CONFIG, curve=[0.5, 0.6])
    write_personalized(run, [0.5, 0.75, 0.25], [0.875, 1.0])
    entry = {"config": "config-resumed-1.yaml", "from_round": 2, "changes": [CHANGE]}
    (run / "changes.json").write_text(json.dumps([entry], indent=2) + "\n")
    return run


def facts(folder):
    run = read_run(folder)
    figures = [(one.mean, dict(one.clients)) for one in (run.test, run.personalized, run.personalized_novel)]
    return figures, dict(run.options), run.history, run.rounds


@pytest.mark.parametrize(
    "name", ["results.json", "clients.csv", "personalized.json", "personalized.csv", "changes.json"]
)
def test_a_file_that_was_cut_anywhere(tmp_path, name):
    run = whole_run(tmp_path / "run")
    expected, content = facts(run), (run / name).read_bytes()
    refusals = []
    for length in range(len(content)):
        (run / name).write_bytes(content[:length])
        try:
            assert facts(run) == expected
        except ConfigurationError as error:
            refusals.append(str(error))
    assert all(f"{run / name} is not a valid file of a run" in refusal for refusal in refusals)
    assert len(refusals) > len(content) - 10  # but for what is not read of the last line


@pytest.mark.parametrize("length", [0, 3, -1])
def test_a_config_that_is_empty_or_ends_within_a_line(tmp_path, length):
    run = whole_run(tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[:length])
    with pytest.raises(ConfigurationError, match=r"config\.yaml is not a valid file of a run"):
        read_run(run)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 0.125, 0.3, 0.5, 1.0]), min_size=1, max_size=8), change=st.data())
def test_rows_are_those_of_the_summary(tmp_path, values, change):
    path = tmp_path / "clients.csv"
    path.write_text("client,accuracy\n" + "".join(f"{client},{value}\n" for client, value in enumerate(values)))
    expected = {"mean": math.fsum(values) / len(values), "num_clients": len(values)}
    assert client_accuracies(path, "accuracy", expected) == dict(enumerate(values))
    assert client_accuracies(path, "accuracy", {}) == dict(enumerate(values))  # nothing to compare with
    other = change.draw(st.sampled_from([{"num_clients": len(values) + 1}, {"mean": expected["mean"] + 0.01}]))
    with pytest.raises(ConfigurationError, match="its content is then missing"):
        client_accuracies(path, "accuracy", {**expected, **other})


def test_a_damaged_evaluation_is_named(tmp_path):
    """Not results.json, which is as it was."""
    accuracy = {"last": {"round": 1, "test": None}, "validation_selected": None, "best_test": None}
    run = write_run(tmp_path / "run", accuracy=accuracy)
    (run / "clients.csv").unlink()
    tested = {"round": 1, "test": summary([0.25, 0.75])}
    content = json.dumps({"accuracy": {"last": tested}, "evaluated": {"score": "classifier", "model": "trained"}})
    (run / "test.json").write_text(content)
    (run / "test_clients.csv").write_text("client,novel,test_accuracy\n0,0,0.25\n")
    with pytest.raises(ConfigurationError, match=r"test_clients\.csv .*accuracies of 1 clients, the results are of 2"):
        read_run(run)
    (run / "test.json").write_text(content[:-20])
    with pytest.raises(ConfigurationError, match=r"run/test\.json is not a valid file of a run"):
        read_run(run)


@pytest.mark.parametrize("name", ["clients.csv", "results.json", "changes.json"])
def test_a_comparison_leaves_it_out_beside_others_and_says_so(tmp_path, monkeypatch, name):
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    whole_run(tmp_path / "runs" / "version_0")
    cut = whole_run(tmp_path / "runs" / "version_1")
    content = (cut / name).read_bytes()
    (cut / name).write_bytes(content[: len(content) // 2])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        main(["compare", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--format", "md"])
    assert any(f"left out of the table: {cut / name} is not" in str(one.message) for one in said)
    with pytest.raises(SystemExit, match=rf"^pfl: .*{name} is not a valid file of a run"):
        main(["compare", str(cut), "--output", str(tmp_path / "out"), "--format", "md"])
