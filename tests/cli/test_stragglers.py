"""Simulated seconds from the command line to the comparison of runs."""

import json
import math

import pytest
from _helpers.configs import digits_config
from _helpers.events import events

from pfl_lightning.cli import main


def config(tmp_path):
    short = {"trainer.max_epochs": 2, "trainer.enable_model_summary": False, "trainer.enable_progress_bar": True}
    return digits_config(tmp_path, short, "FedAvg", "mlp", "DominantClasses")


def test_results_logs_and_comparison_have_simulated_seconds(tmp_path, monkeypatch, capsys):
    words = ["--stragglers.devices.spread", "1", "--stragglers.deadline", "30", "--stragglers.late", "partial"]
    main(["fit", "--config", config(tmp_path), *words])
    assert "simulated until " in capsys.readouterr().out
    run = tmp_path / "runs" / "version_0"
    results = json.loads((run / "results.json").read_text())
    clock = [entry["simulated_seconds"] for entry in results["history"]]
    assert 0 < clock[0] < clock[1] <= 60
    assert results["simulated_seconds"] == clock[1]
    logged = [event.value for event in events(tmp_path / "runs").Scalars("simulated/seconds")]
    assert logged == pytest.approx(clock)
    monkeypatch.chdir(tmp_path)
    target = str(math.floor(1000 * results["history"][0]["test"]["accuracy"]) / 1000)  # met after the first round
    main(["compare", "runs", "--target-accuracy", target, "--format", "csv"])
    header, row = (tmp_path / "comparison" / "comparison.csv").read_text().splitlines()
    figures = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(figures["simulated_seconds"]) == pytest.approx(clock[1])
    assert float(figures["simulated_seconds_to_target"]) == pytest.approx(clock[0])


def test_a_trace_that_does_not_fit_is_said_before_the_first_round(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,seconds_per_step\n0,1\n1,-1\n")
    with pytest.raises(SystemExit):
        main(["fit", "--config", config(tmp_path), "--stragglers.devices.trace", str(trace)])
    assert "line 3, client 1: seconds_per_step must be a finite number above 0, got -1.0" in capsys.readouterr().err
