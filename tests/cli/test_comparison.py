"""``pfl compare``: what runs left behind, put side by side; figures against numpy."""

import csv
import json
import math

import numpy as np
import pytest
import yaml
from PIL import Image

from pfl_lightning.cli import main
from pfl_lightning.cli.comparison import compare_runs, find_runs, read_run
from pfl_lightning.errors import ConfigurationError

SMALL = [
    "--config=configs/fedavg_digits.yaml",
    "--model.encoder=mlp",
    "--model.method.init_args.epochs=1",
    "--data.init_args.partition.init_args.num_clients=4",
    "--data.init_args.partition.init_args.samples_per_client=40",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.max_epochs=2",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of FedAvg and one of FedPer."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        main(["fit", *SMALL, f"--run_dir={folder / 'fedavg'}", f"--seed_everything={seed}"])
    main(["fit", *SMALL, f"--run_dir={folder / 'fedper'}", "--model.method=pfl_lightning.methods.FedPer"])
    return folder


def accuracies(folder, column="test_accuracy_last"):
    with (folder / "clients.csv").open() as file:
        return np.array([float(row[column]) for row in csv.DictReader(file)])


def compare(capsys, *args):
    capsys.readouterr()
    main(["compare", *map(str, args)])
    return capsys.readouterr().out


def write_run(folder, *, seed=0, method="FedAvg", config=None, curve=((0, 0.5),), **changes):
    folder.mkdir(parents=True)
    summary = {"mean": curve[-1][1], "std": 0.1, "worst_decile": 0.2}
    results = {
        "method": method,
        "rounds": len(curve),
        "num_clients": 3,
        "seed": seed,
        "format": 2,
        "accuracy": {"last": {"test": summary}, "validation_selected": None, "best_test": {"test": summary}},
        "bytes": {"up": 1000, "down": 2000},
        "seconds_per_round": 2.0,
        "history": [{"round": round, "test": {"accuracy": value}} for round, value in curve],
        **changes,
    }
    (folder / "results.json").write_text(json.dumps(results))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_seeds_are_one_row_and_its_figures_are_those_of_numpy(runs, tmp_path, capsys):
    out = compare(capsys, runs / "fedavg", runs / "fedper", "--output", tmp_path / "out")
    assert "FedAvg" in out
    assert "FedPer" in out
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"FedAvg", "FedPer"}
    assert rows["FedAvg"]["seeds"] == "2"
    clients = [accuracies(runs / "fedavg" / f"version_{number}") for number in (0, 1)]
    means, stds = [values.mean() for values in clients], [values.std() for values in clients]
    assert float(rows["FedAvg"]["mean"]) == pytest.approx(np.mean(means))
    assert float(rows["FedAvg"]["mean_std_over_seeds"]) == pytest.approx(np.std(means, ddof=1))
    assert float(rows["FedAvg"]["std"]) == pytest.approx(np.mean(stds))
    assert float(rows["FedAvg"]["worst_decile"]) == pytest.approx(np.mean([values.min() for values in clients]))
    assert float(rows["FedPer"]["mean"]) == pytest.approx(accuracies(runs / "fedper" / "version_0").mean())
    assert rows["FedPer"]["mean_std_over_seeds"] == ""
    one = json.loads((runs / "fedper" / "version_0" / "results.json").read_text())
    assert float(rows["FedPer"]["bytes_up"]) == one["bytes"]["up"] > 0


def test_the_markdown_says_what_the_table_says(runs, tmp_path, capsys):
    compare(capsys, runs / "fedavg", "--output", tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    heading, line = text.splitlines()[2], text.splitlines()[4]
    cells = dict(zip(heading.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    means = [100 * accuracies(runs / "fedavg" / f"version_{number}").mean() for number in (0, 1)]
    assert cells["mean, %"] == f"{np.mean(means):.2f} ± {np.std(means, ddof=1):.2f}"
    assert cells["run"] == "FedAvg"
    assert cells["rounds"] == "2"
    assert cells["clients"] == "4"


def test_the_picture_has_curves_and_clients(runs, tmp_path, capsys):
    compare(capsys, runs / "fedavg", runs / "fedper", "--output", tmp_path)
    picture = np.asarray(Image.open(tmp_path / "comparison.png").convert("RGB"))
    colors = {tuple(pixel) for pixel in picture.reshape(-1, 3)}
    assert picture.shape[:2] == (456, 1200)
    assert {(31, 119, 180), (255, 127, 14)} <= colors


def test_the_chosen_round_is_the_one_asked_for(runs, tmp_path, capsys):
    compare(capsys, runs / "fedper", "--choice", "best_test", "--output", tmp_path)
    with (tmp_path / "comparison.csv").open() as file:
        (row,) = csv.DictReader(file)
    expected = accuracies(runs / "fedper" / "version_0", "test_accuracy_best_test").mean()
    assert float(row["mean"]) == pytest.approx(expected)


def test_a_narrow_terminal_gets_a_column_for_each_run(runs, tmp_path, capsys, monkeypatch):
    for width, first in ((60, ["run", "FedAvg"]), (200, ["run", "seeds"])):
        monkeypatch.setenv("COLUMNS", str(width))
        out = compare(capsys, runs / "fedavg", "--output", tmp_path)
        heading = next(line for line in out.splitlines() if "run " in line and "┃" in line)
        assert [cell.strip() for cell in heading.strip("┃").split("┃")][:2] == first


def test_labels_name_the_rows_in_their_order(runs, tmp_path, capsys):
    compare(capsys, runs / "fedper", runs / "fedavg", "--labels", "personal", "global", "--output", tmp_path)
    with (tmp_path / "comparison.csv").open() as file:
        rows = [(row["run"], row["method"]) for row in csv.DictReader(file)]
    assert rows == [("personal", "FedPer"), ("global", "FedAvg")]
    with pytest.raises(SystemExit, match="--labels has 1 names for 2 configurations: FedPer, FedAvg"):
        main(["compare", str(runs / "fedper"), str(runs / "fedavg"), "--labels", "one"])


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"seed_everything": 5}, 1),
        ({"data": {"init_args": {"seed": 3, "root": "elsewhere"}}}, 1),
        ({"run_dir": "another"}, 1),
        ({"data": {"init_args": {"batch_size": 7}}}, 2),
        ({"model": {"method": {"init_args": {"lr": 0.5}}}}, 2),
        ({"loop": {"cohort": 0.5}}, 2),
    ],
)
def test_runs_are_one_row_if_only_seeds_and_places_differ(tmp_path, change, rows):
    base = {
        "seed_everything": 0,
        "run_dir": "runs",
        "model": {"method": {"init_args": {"lr": 0.1}}},
        "data": {"init_args": {"seed": 0, "root": "data"}},
        "loop": {"cohort": 1.0},
    }
    paths = [write_run(tmp_path / "a", config=base), write_run(tmp_path / "b", seed=1, config=base | change)]
    assert len(compare_runs(map(read_run, paths))) == rows


def test_of_two_runs_with_equal_seeds_the_later_counts(tmp_path):
    paths = [write_run(tmp_path / f"version_{n}", config={}, curve=((0, value),)) for n, value in ((0, 0.25), (1, 0.5))]
    (row,) = compare_runs(map(read_run, paths))
    assert [run.path for run in row.runs] == [paths[1]]
    assert row.over_seeds("mean")[0] == 0.5


def test_curves_hold_the_rounds_that_all_seeds_evaluated(tmp_path):
    curves = [((0, 0.1), (1, 0.2), (2, 0.4)), ((0, 0.3), (2, 0.8))]
    paths = [
        write_run(tmp_path / str(seed), seed=seed, curve=curve, rounds=3, config={})
        for seed, curve in enumerate(curves)
    ]
    (row,) = compare_runs(map(read_run, paths))
    expected = [(0, 0.2, np.std([0.1, 0.3], ddof=1)), (2, 0.6, np.std([0.4, 0.8], ddof=1))]
    assert [round for round, _, _ in row.curve()] == [0, 2]
    assert np.allclose(row.curve(), expected)


def test_methods_of_several_settings_are_called_by_their_folders_too(tmp_path):
    paths = [
        write_run(tmp_path / "strong" / "version_0", config={"loop": {"cohort": 1.0}}),
        write_run(tmp_path / "weak" / "version_0", config={"loop": {"cohort": 0.5}}),
        write_run(tmp_path / "weak" / "version_1", config={"loop": {"cohort": 0.1}}),
        write_run(tmp_path / "other", method="FedPer", config={}),
    ]
    labels = [row.label for row in compare_runs(map(read_run, paths))]
    assert labels == ["FedAvg (strong)", "FedAvg (weak/version_0)", "FedAvg (weak/version_1)", "FedPer"]


def test_a_personalization_has_columns_of_its_own(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    compare(capsys, folder, "--output", tmp_path / "before")
    assert "novel" not in (tmp_path / "before" / "comparison.md").read_text()
    content = {"participating": {"mean": 0.75}, "novel": {"mean": 0.625}}
    (folder / "personalized.json").write_text(json.dumps(content))
    compare(capsys, folder, "--output", tmp_path / "after")
    assert "| 75.00 | 62.50 |" in (tmp_path / "after" / "comparison.md").read_text()


def test_a_round_that_nobody_validated_has_no_figures(tmp_path):
    run = read_run(write_run(tmp_path / "run"), "validation_selected")
    assert math.isnan(run.mean)
    assert run.bytes_up == 1000


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: (p / "version_0").mkdir(parents=True)])
def test_a_folder_without_results_is_named(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"no results\.json in .*run or .*version_\*.*`pfl fit` writes it"):
        find_runs(tmp_path / "run")
    with pytest.raises(SystemExit, match=r"^pfl: no results\.json"):
        main(["compare", str(tmp_path / "run")])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"method": "FedAvg"}'])
def test_foreign_results_are_named(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"results\.json is not what a run of this package leaves"):
        read_run(tmp_path)


def test_a_run_that_is_not_finished_is_named(tmp_path):
    with pytest.warns(UserWarning, match="run is not finished: it has 1 rounds"):
        read_run(write_run(tmp_path / "run", finished=False))
