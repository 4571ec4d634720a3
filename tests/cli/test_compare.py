"""``pfl compare``: what runs left behind, put side by side; figures against numpy."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _helpers.configs import SMALL
from _helpers.finished import write_run
from PIL import Image

import pfl_lightning
from pfl_lightning.cli import main

OPTIONS = (
    "--config=configs/fedavg_digits.yaml",
    *SMALL,
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.max_epochs=2",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of FedAvg and one of FedPer."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        main(["fit", *OPTIONS, f"--run_dir={folder / 'fedavg'}", f"--seed_everything={seed}"])
    main(["fit", *OPTIONS, f"--run_dir={folder / 'fedper'}", "--model.method=pfl_lightning.methods.FedPer"])
    return folder


def accuracies(folder, column="test_accuracy_last"):
    with (folder / "clients.csv").open() as file:
        return np.array([float(row[column]) for row in csv.DictReader(file)])


def compare(capsys, *args):
    capsys.readouterr()
    main(["compare", *map(str, args)])
    return capsys.readouterr().out


def read_csv(folder, name="comparison.csv"):
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def test_seeds_are_one_row_and_its_figures_are_those_of_numpy(runs, tmp_path, capsys):
    out = compare(capsys, runs / "fedavg", runs / "fedper", "--output", tmp_path / "out", "--format", "csv")
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
    compare(capsys, runs / "fedavg", "--output", tmp_path, "--format", "md")
    text = (tmp_path / "comparison.md").read_text()
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| run"))
    heading, line = lines[start], lines[start + 2]
    cells = dict(zip(heading.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    means = [100 * accuracies(runs / "fedavg" / f"version_{number}").mean() for number in (0, 1)]
    assert cells["test accuracy, %"].strip("*") == f"{np.mean(means):.2f} ± {np.std(means, ddof=1):.2f}"
    assert cells["run"] == "FedAvg"
    assert cells["rounds"] == "2"
    assert cells["clients"] == "4"


def test_the_picture_has_curves_and_clients(runs, tmp_path, capsys):
    compare(capsys, runs / "fedavg", runs / "fedper", "--output", tmp_path, "--format", "png")
    picture = Image.open(tmp_path / "comparison.png").convert("RGB")
    colors = {color for _, color in picture.getcolors(maxcolors=2**24)}
    assert picture.height == 456
    assert {(31, 119, 180), (255, 127, 14)} <= colors


def test_the_chosen_round_is_the_one_asked_for(runs, tmp_path, capsys):
    compare(capsys, runs / "fedper", "--choice", "best_test", "--output", tmp_path, "--format", "csv")
    with (tmp_path / "comparison.csv").open() as file:
        (row,) = csv.DictReader(file)
    expected = accuracies(runs / "fedper" / "version_0", "test_accuracy_best_test").mean()
    assert float(row["mean"]) == pytest.approx(expected)


def test_a_narrow_terminal_gets_a_column_for_each_run(runs, tmp_path, capsys, monkeypatch):
    for width, first in ((60, ["run", "FedAvg"]), (200, ["run", "seeds"])):
        monkeypatch.setenv("COLUMNS", str(width))
        out = compare(capsys, runs / "fedavg", "--output", tmp_path, "--format", "md")
        heading = next(line for line in out.splitlines() if "run " in line and "┃" in line)
        assert [cell.strip() for cell in heading.strip("┃").split("┃")][:2] == first


def test_labels_name_the_rows_in_their_order(runs, tmp_path, capsys):
    compare(
        capsys,
        runs / "fedper",
        runs / "fedavg",
        "--labels",
        "personal",
        "global",
        "--output",
        tmp_path,
        "--format",
        "csv",
    )
    with (tmp_path / "comparison.csv").open() as file:
        rows = [(row["run"], row["method"]) for row in csv.DictReader(file)]
    assert rows == [("personal", "FedPer"), ("global", "FedAvg")]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["compare", str(runs / "fedper"), str(runs / "fedavg"), "--labels", "one"])
    assert "--labels has 1 names for 2 configurations: FedPer; FedAvg" in capsys.readouterr().err


def test_a_personalization_has_columns_of_its_own(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    compare(capsys, folder, "--output", tmp_path / "before", "--format", "md")
    assert "novel" not in (tmp_path / "before" / "comparison.md").read_text()
    content = {"participating": {"mean": 0.75}, "novel": {"mean": 0.625}}
    (folder / "personalized.json").write_text(json.dumps(content))
    compare(capsys, folder, "--output", tmp_path / "after", "--format", "md")
    assert "| 75.00 | 62.50 |" in (tmp_path / "after" / "comparison.md").read_text()


def test_runs_that_were_personalized_differently_are_apart_where_that_is_compared(tmp_path, capsys):
    for seed, train in enumerate(("head", "all", "all")):
        folder = write_run(tmp_path / f"run_{seed}", seed=seed, config={"personalize": None})
        content = {"participating": {"mean": 0.25 * (seed + 1)}, "round": 1, "personalization": {"train": train}}
        (folder / "personalized.json").write_text(json.dumps(content))
    folders = [tmp_path / f"run_{seed}" for seed in range(3)]
    compare(capsys, *folders, "--figure=personalized", f"--output={tmp_path}", "--format=csv")
    assert [(row["run"], row["seeds"]) for row in read_csv(tmp_path)] == [
        ("FedAvg, train=head", "1"),
        ("FedAvg, train=all", "2"),
    ]
    compare(capsys, *folders, f"--output={tmp_path}", "--format=csv")
    assert [(row["run"], row["seeds"]) for row in read_csv(tmp_path)] == [("FedAvg", "3")]


def test_options_that_differ_name_the_rows_on_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    for number, lr in enumerate((0.01, 0.02, 0.02)):
        method = {"class_path": "pfl_lightning.methods.FedAvg", "init_args": {"lr": lr}}
        folder = tmp_path / "runs" / f"version_{number}"
        write_run(folder, seed=number, config={"model": {"method": method}})
    out = compare(capsys, tmp_path / "runs", "--output", tmp_path / "out", "--format", "csv")
    assert "FedAvg, lr=0.01" in out
    assert "FedAvg, lr=0.02" in out
    assert "version_" not in out
    assert [row["seeds"] for row in read_csv(tmp_path / "out")] == ["1", "2"]


def test_a_nearest_neighbor_score_never_stands_among_those_of_classifiers(tmp_path, capsys):
    neighbors = {"score": "nearest_neighbor", "model": "aggregated"}
    write_run(tmp_path / "runs" / "a", clients=[0.5, 0.7], curve=[0.4, 0.6])
    write_run(tmp_path / "runs" / "b", "Calibre", [0.8, 1.0], evaluated=neighbors, curve=[0.3, 0.9])
    options = ("--target-accuracy", "0.5", "--output", tmp_path / "out", "--format", "md", "csv")
    out = compare(capsys, tmp_path / "runs", *options)
    assert "classifier scores" in out
    assert "nearest-neighbor scores" in out
    assert "Significance" not in out
    rows = {row["run"]: row for row in read_csv(tmp_path / "out")}
    assert (rows["Calibre"]["mean"], rows["FedAvg"]["nearest_neighbor_mean"]) == ("", "")
    assert float(rows["Calibre"]["nearest_neighbor_mean"]) == pytest.approx(0.9)
    assert (rows["Calibre"]["rounds_to_target"], rows["Calibre"]["score"]) == ("", "nearest_neighbor")
    assert float(rows["FedAvg"]["rounds_to_target"]) == 2
    for table in (tmp_path / "out" / "comparison.md").read_text().split("\n\n"):
        assert not ("| FedAvg |" in table and "| Calibre |" in table)


def test_runs_of_other_data_have_a_table_of_their_own(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", data={"name": "CIFAR10", "fingerprint": "sha256:c"})
    out = compare(capsys, tmp_path / "runs", "--output", tmp_path / "out", "--format", "md", "html")
    assert "Digits, Dirichlet" in out
    assert "CIFAR10, Dirichlet" in out
    assert "several settings, data sets or partitions: each has its own table" in " ".join(out.split())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison.html", "comparison.md"]


def test_a_reference_is_chosen_by_its_name(tmp_path, capsys):
    for method, value in (("FedAvg", 0.5), ("FedPAC", 0.9)):
        write_run(tmp_path / "runs" / method, method, [value] * 3)
    compare(capsys, tmp_path / "runs", "--output", tmp_path, "--reference", "FedAvg", "--format", "csv")
    assert [row["reference"] for row in read_csv(tmp_path)] == ["", "FedAvg"]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["compare", str(tmp_path / "runs"), "--reference", "Fed"])
    assert "no such row; there are FedAvg; FedPAC" in capsys.readouterr().err
    write_run(tmp_path / "runs" / "others", data={"name": "CIFAR10", "fingerprint": "sha256:c"})
    with pytest.raises(SystemExit, match=r"^2$"):  # a row of two tables is named once
        main(["compare", str(tmp_path / "runs"), "--reference", "Fed"])
    assert "there are FedAvg; FedPAC\n" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["80", "0", "-1"])
def test_a_target_is_a_share(capsys, value):
    with pytest.raises(SystemExit):
        main(["compare", "runs", f"--target-accuracy={value}"])
    assert "must be above 0 and at most 1 (0.8 is 80 %), got" in capsys.readouterr().err


def test_a_damaged_run_found_beside_others_is_left_out_and_named(tmp_path, capsys):
    write_run(tmp_path / "a" / "version_0", method="FedAvg")
    damaged = write_run(tmp_path / "b" / "version_0", method="FedPAC")
    (damaged / "results.json").write_text('{"method": "FedP')
    with pytest.warns(
        UserWarning, match=r"left out of the table: .*b/version_0/results\.json is not a valid file of a run"
    ):
        printed = compare(capsys, str(tmp_path), "--output", str(tmp_path / "out"))
    assert "FedAvg" in printed
    assert "FedPAC" not in printed


@pytest.mark.parametrize("named", ["version_0", "."])
def test_a_damaged_run_that_was_named_itself_or_is_the_only_one_is_an_error(tmp_path, capsys, named):
    damaged = write_run(tmp_path / "b" / "version_0", method="FedPAC")
    (damaged / "results.json").write_text("")
    write_run(tmp_path / "a" / "version_0", method="FedAvg")
    runs = [str(tmp_path / "b" / named)] + ([str(tmp_path / "a")] if named == "version_0" else [])
    with pytest.raises(SystemExit, match=r"version_0/results\.json is not a valid file of a run"):
        main(["compare", *runs, "--output", str(tmp_path / "out")])


def test_a_folder_without_results_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"^pfl: no results\.json"):
        main(["compare", str(tmp_path / "run")])


LIGHT = """
import sys, types
# What lies above imports PyTorch where it is asked for more than this.
for name in ("pfl_lightning", "pfl_lightning.cli"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + name.removeprefix("pfl_lightning").replace(".", "/")]
from pfl_lightning.cli.compare import compare
compare(sys.argv[2:])
heavy = {"torch", "lightning", "matplotlib", "sklearn"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_comparison_needs_neither_pytorch_nor_without_pictures_matplotlib(tmp_path):
    write_run(tmp_path / "run")
    package = str(Path(pfl_lightning.__file__).parent)
    args = [package, str(tmp_path / "run"), "--output", str(tmp_path), "--format", "md", "csv", "tex"]
    found = subprocess.run([sys.executable, "-c", LIGHT, *args], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr


def test_an_output_that_cannot_be_written(tmp_path):
    write_run(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"File exists: \S*file"):
        main(["compare", str(tmp_path / "runs"), "--output", str(tmp_path / "file")])


def test_clients_that_never_trained_are_named_below_the_table(tmp_path, capsys):
    write_run(tmp_path / "a", clients=(0.25, 0.75, 0.5), rounds_trained=[0, 4, 4], novel_clients=[])
    write_run(tmp_path / "b", "FedPer", clients=(0.25, 0.75, 0.5), rounds_trained=[2, 4, 0], novel_clients=[2])
    write_run(tmp_path / "c", "Ditto", clients=(0.25, 0.75, 0.5))  # of a version that did not count rounds
    out = " ".join(compare(capsys, *(tmp_path / name for name in "abc"), "--output", tmp_path / "out").split())
    said = "FedAvg, seed 0: 1 client never trained (0; mean 25.00 %, of the other 2: 62.50 %)."
    assert f"Clients that no round drew, or whose updates were left out: {said}" in out
    assert said in (tmp_path / "out" / "comparison.md").read_text()


def test_further_metrics_that_were_measured_are_named(tmp_path, capsys):
    write_run(tmp_path / "plain")
    assert "--metric" not in compare(capsys, tmp_path / "plain", "--output", tmp_path / "out", "--format", "csv")
    write_run(tmp_path / "more", config={"model": {"metrics": ["torchmetrics.classification.F1", "auroc"]}})
    out = compare(capsys, tmp_path / "more", "--output", tmp_path / "out", "--format", "csv")
    assert "Compared by accuracy; --metric F1 compares by" in out
