"""Reports as files: what they say, what is marked, and that they stand alone."""

import base64
import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
from _helpers.finished import write_personalized, write_run
from PIL import Image
from rich.console import Console

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.report import ReportSettings, Row, live_table, read_run, write_report
from pfl_lightning.report.formats import latex_table
from pfl_lightning.report.rows import MeasuredRow, measure
from pfl_lightning.report.tables import Cell, TextTable, block_columns, block_table
from pfl_lightning.report.writing import STUDY_NAMES, Report

METHODS = {"FedAvg": 0.6, "FedPAC": 0.8, "Ditto_<b>&": 0.7}
NEIGHBORS = {"score": "nearest_neighbor", "model": "aggregated"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return make_rows(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def report(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(rows, folder, settings())
    return folder


def make_rows(tmp_path):
    """Three methods of two seeds in two settings, and a self-supervised one."""
    found = []
    random = np.random.default_rng(0)
    for setting in ("20 clients", "few & more"):
        for method, mean in METHODS.items():
            folders = []
            for seed in (0, 1):
                folder = tmp_path / "runs" / setting / method.replace("/", "") / f"seed_{seed}"
                clients = (mean + random.uniform(-0.1, 0.1, 8)).tolist()
                curve = [0.5 * mean, float(np.mean(clients))]
                config = {"model": {"method": {"class_path": "a." + method, "init_args": {"lr": mean}}}}
                folders.append(write_run(folder, method, clients, seed=seed, curve=curve, config=config))
            published = 60.0 if method == "FedAvg" else None
            found.append(Row(method, setting, tuple(folders), published))
        folder = write_run(tmp_path / "runs" / setting / "Calibre", "Calibre", [0.9] * 8, evaluated=NEIGHBORS)
        found.append(Row("Calibre", setting, (folder,)))
    return found


def test_runs_of_other_data_in_one_table_are_told(tmp_path):
    """Such as those of a study whose folder of images has changed since its first runs."""

    def row(label, *data, setting="", **init_args):
        folders = []
        for seed, fingerprint in enumerate(data):
            config = {"data": {"class_path": "a.ImageFolder", "init_args": {"root": fingerprint, **init_args}}}
            source = {"name": "ImageFolder", "fingerprint": f"sha256:{fingerprint}"}
            folder = tmp_path / setting / label / f"seed_{seed}"
            folders.append(write_run(folder, label, seed=seed, config=config, data=source))
        return Row(label, setting, tuple(folders))

    mixed = [row("FedAvg", "aaaabbbbcccc", "aaaabbbbcccc"), row("FedPer", "aaaabbbbcccc", "ddddeeeeffff")]
    told = (
        "fingerprint aaaabbbb (FedAvg, seed 0; FedAvg, seed 1; FedPer, seed 0), fingerprint ddddeeee (FedPer, seed 1)"
    )
    assert f"means and tests mix data sets: {told}. Move the folders" in markdown(mixed)
    assert "mix data sets" in str(live_table(mixed, settings()).caption)
    assert live_table(mixed[:1], settings()).caption is None
    others = [row("seeds", "one", seed=1), row("seeds of their own", "two", seed=2), row("half", "three", size=8)]
    assert "mix data sets" not in markdown(others)
    settings_of_their_own = [row("FedAvg", "pacs", setting="PACS"), row("FedAvg", "home", setting="Office-Home")]
    assert "mix data sets" not in markdown(settings_of_their_own)


def test_rows_of_other_data_have_tables_of_their_own(tmp_path):
    """In one setting, too: no best row and no test is among them."""

    def row(label, data, clients, **partition):
        rule = {"class_path": "a.IID", "init_args": partition}
        config = {"data": {"class_path": f"a.{data}", "init_args": {"partition": rule}}}
        source = {"name": data, "fingerprint": f"sha256:{data}"}
        folders = [
            write_run(tmp_path / label / str(seed), label, clients, seed=seed, config=config, data=source)
            for seed in (0, 1)
        ]
        return Row(label, "", tuple(folders))

    one = row("FedAvg", "Digits", (0.5, 0.6, 0.7), num_clients=3)
    rows = [one, row("FedPer", "Digits", (0.6, 0.7, 0.8), num_clients=3), row("Other", "EMNIST", (0.9,) * 3), one]
    write_report(rows[:3], tmp_path / "report", settings())
    text = (tmp_path / "report" / "table.md").read_text()
    assert "each has its own table" in text
    assert "**Digits" in text
    assert "**EMNIST" in text
    assert re.search(r"Fed\w+ \|.*(FedAvg|FedPer)|against (FedAvg|FedPer)", text)
    assert not re.search(r"against Other|Other against", text)
    missing = Row("FedRep", "", (), planned=2)
    write_report([*rows[:2], missing], tmp_path / "report", settings())
    assert "each has its own table" not in (tmp_path / "report" / "table.md").read_text()


def test_a_personalized_figure_is_of_no_chosen_round(tmp_path):
    folder = write_run(tmp_path / "run", "FedAvg")
    write_personalized(folder)
    told = markdown([Row("FedAvg", "", (folder,))], figure="personalized", choice="best_test")
    assert "mean over clients; ±" in told
    assert "best test round" not in told


def test_models_that_are_not_of_the_last_round_are_told(tmp_path):
    """A run that is not evaluated in its last round, or was personalized from another one."""
    config = {"model": {"method": {"class_path": "a.FedAvg"}}}
    early = write_run(tmp_path / "early", clients=[0.5] * 4, curve=[0.1, 0.2, 0.3], config=config, rounds=4)
    late = write_run(tmp_path / "late", clients=[0.6] * 4, curve=[0.1, 0.2, 0.3], config=config)
    found = [Row("early", "", (early,)), Row("late", "", (late,))]
    assert "Not of the last round: early: round 3 of 4." in markdown(found)
    assert "Not of the last round" not in markdown(found, choice="best_test")
    assert "Not of the last round" not in markdown(found[1:])
    write_personalized(late, participating=[0.7] * 4)
    assert "Not of the last round" not in markdown(found[1:], figure="personalized")
    content = json.loads((late / "personalized.json").read_text())
    (late / "personalized.json").write_text(json.dumps(content | {"round": 1}))
    text = markdown(found[1:], figure="personalized")
    assert "Not of the last round: late: round 1 of 3." in text
    assert "70.00" in text


def settings(**changes):
    given = {"title": "A study <of> four", "target_accuracy": 0.55, "source": "Paper, Table 1", "note": "A note."}
    return ReportSettings(**given | changes)


def markdown(rows, **changes):
    """The report in Markdown alone."""
    return Report(tuple(measure(rows, settings(**changes))), settings(**changes)).markdown()


def tables(text):
    """Cells of each table, by heading, by label, by the line above the table."""
    found = {}
    for block in re.finditer(r"\*\*(.*)\*\*\n\n((?:\|.*\n)+)", text):
        heading, _, *lines = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in block[2].splitlines()]
        found[block[1]] = {line[0]: dict(zip(heading, line, strict=True)) for line in lines}
    return found


NAMES = ["table.md", "table.csv", "table_runs.csv", "table.tex", "curves.png", "report.html"]


def test_every_file_is_written_and_no_other(report):
    assert sorted(path.name for path in report.iterdir()) == sorted(NAMES)


def test_the_markdown_has_blocks_published_figures_and_ranks(rows, report):
    text = (report / "table.md").read_text()
    found = tables(text)
    block = found["few & more: classifier scores"]
    assert list(block) == ["FedAvg", "FedPAC", "Ditto\\_\\<b>&"]
    means = [_mean(folder) for folder in rows[4].runs]
    expected = f"{100 * np.mean(means):.2f} ± {100 * np.std(means, ddof=1):.2f}"
    assert block["FedAvg"]["test accuracy, %"] == expected
    assert block["FedAvg"]["published, %"] == "60.00"
    assert block["FedAvg"]["difference"] == f"{100 * np.mean(means) - 60:+.2f}"
    assert block["FedAvg"]["rounds to 55 %"] == "2.0 ± 0.0"
    assert block["FedAvg"]["MB to 55 %"] == "8.00 ± 0.00"
    assert block["FedPAC"]["test accuracy, %"].startswith("**")
    assert not block["FedAvg"]["test accuracy, %"].startswith("**")
    assert list(found["few & more: nearest-neighbor scores"]) == ["Calibre"]
    assert list(found["Significance: 20 clients"]) == ["FedAvg", "Ditto\\_\\<b>&"]
    ranking = next(table for title, table in found.items() if title.startswith("Ranking over 2 settings"))
    assert list(ranking) == ["FedPAC", "Ditto\\_\\<b>&", "FedAvg"]
    assert "Published figures: Paper, Table 1." in text
    assert "A note." in text
    assert "clients of a run share a model" in text


def _mean(folder):
    with (folder / "clients.csv").open() as file:
        return np.mean([float(row["test_accuracy_last"]) for row in csv.DictReader(file)])


def test_missing_and_unfinished_runs_are_counted_and_left_out(tmp_path):
    rows = make_rows(tmp_path)
    write_run(rows[0].runs[0], "FedAvg", [0.0] * 8, finished=False)
    rows[1] = Row("FedPAC", "20 clients", rows[1].runs, planned=3)
    text = markdown(rows)
    block = tables(text)["20 clients: classifier scores"]
    assert block["FedAvg"]["seeds"] == "1 of 2"
    assert block["FedPAC"]["seeds"] == "2 of 3"
    assert "0.00" not in block["FedAvg"]["test accuracy, %"]
    assert "13 of 15 runs are finished" in text


def test_a_row_has_as_many_runs_as_it_was_planned_with(rows):
    """Also where every row has the same number of finished ones."""
    text = markdown([replace(row, planned=3) for row in rows[:3]])
    block = tables(f"**block**\n\n{text[text.index('| run') :]}")["block"]
    assert [line["seeds"] for line in block.values()] == ["2 of 3"] * 3
    assert "6 of 9 runs are finished" in text


def test_rows_whose_options_were_searched_are_told_from_others(rows):
    some = [replace(rows[0], trials=0), replace(rows[1], trials=12)]
    text = markdown(some)
    assert "| run | seeds | rounds | clients | model | search trials |" in text
    note = "Options were chosen by a search on validation parts, separately in each setting (FedPAC: 12 trials). Those"
    assert f"{note} of FedAvg were not: each has the one setting that the study gives it" in text
    report = Report(tuple(measure(some, settings())), settings())
    assert "FedPAC: 12 trials" in report.latex()
    both = markdown([replace(row, trials=12) for row in rows[:2]])
    assert "(FedAvg, FedPAC: 12 trials)." in both
    assert "were not: each has" not in both
    of_a_grid = [replace(row, label=f"{row.label}, lr=1", trials=12) for row in rows[:2]]
    assert "(FedAvg, lr=1; FedPAC, lr=1: 12 trials)." in markdown(of_a_grid)


def test_where_a_block_has_no_such_reference_the_best_row_is(rows):
    found = tables(markdown([*rows[:4], *rows[5:7]], reference="FedAvg"))
    assert {line["against"] for line in found["Significance: few & more"].values()} == {"FedPAC"}


def test_what_the_ranking_leaves_out_is_named(rows):
    text = markdown([row for row in rows if row != rows[6]])
    assert "scores of one kind in every setting: Ditto_<b>&, Calibre." in text


def test_the_csv_has_plain_numbers(rows, report):
    with (report / "table.csv").open() as file:
        found = {(row["setting"], row["run"]): row for row in csv.DictReader(file)}
    row = found["20 clients", "Ditto_<b>&"]
    assert float(row["mean"]) == pytest.approx(np.mean([_mean(folder) for folder in rows[2].runs]))
    assert row["reference"] == "FedPAC"
    assert 0 < float(row["p_seeds"]) <= 1
    assert (row["pairs_of_seeds"], row["pairs_of_clients"]) == ("2", "16")
    assert found["20 clients", "Calibre"]["mean"] == ""
    with (report / "table_runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 14
    assert {row["partition_fingerprint"] for row in runs} == {"sha256:p0", "sha256:p1"}


def test_the_latex_is_of_booktabs_with_every_sign_escaped(report):
    text = (report / "table.tex").read_text()
    assert r"Ditto\_$<$b$>$\&" in text
    assert r"\textit{few \& more: classifier scores}" in text
    assert re.search(r"\\textbf\{\d\d\.\d\d \$\\pm\$ \d\.\d\d\}", text)
    for table in text.split(r"\begin{tabular}")[1:]:
        columns = len(re.match(r"\{(\w+)\}", table)[1])
        assert all(rule in table for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"))
        lines = [line for line in table.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {columns}
    assert not re.search(r"(?<!\\)[%#_]", text.split("\n", 1)[1])


class Page(HTMLParser):
    """The elements of a page: what they load, and whether each is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.tags, self.text = [], [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_opens_without_a_network(rows, report):
    content = (report / "report.html").read_text()
    page = Page()
    page.feed(content)
    assert page.open == []
    assert not {"script", "link", "iframe", "b<", "of"} & page.tags
    (picture,) = page.loads
    assert picture.startswith("data:image/svg+xml;base64,")
    assert b"<svg" in base64.b64decode(picture.partition(",")[2])
    assert "@import" not in content
    assert "url(" not in content
    text = "".join(page.text)
    assert "A study <of> four" in text
    assert "Ditto_<b>&" in text
    for said in ("published, %", '"class_path": "a.FedPAC"', "torch 2.9.0", str(rows[0].runs[1])):
        assert said in text


def test_the_same_results_make_the_same_files(rows, tmp_path):
    """Without the pictures as points, which take longest to draw, and are the same as those of the page."""
    names = {form: name for form, name in STUDY_NAMES.items() if form != "png"}
    reports = (Report(tuple(measure(rows[:2], settings())), settings()) for _ in range(2))
    first, second = (one.write(tmp_path / name, names) for one, name in zip(reports, "ab", strict=True))
    assert len(first) == len(NAMES) - 1
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_the_curves_have_panels_for_settings_and_scores(report):
    picture = Image.open(report / "curves.png")
    assert picture.size == (1440, 4 * 456)  # two settings of two scores
    colors = {color for _, color in picture.convert("RGB").getcolors(maxcolors=2**24)}
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colors


def test_a_headline_of_personalized_clients(tmp_path):
    folder = write_personalized(write_run(tmp_path / "run", "Calibre", evaluated=NEIGHBORS), [0.5, 0.75], [0.25])
    scratch = write_personalized(tmp_path / "scratch", [0.25, 0.5])
    rows = [Row("Calibre", "", (folder,)), Row("Script-Fair", "", (scratch,))]
    lines = markdown(rows, figure="personalized").splitlines()
    heading = next(line for line in lines if line.startswith("| run"))
    assert heading.split(" | ")[1:6] == ["seeds", "rounds", "clients", "model", "personalized accuracy, %"]
    assert "nearest-neighbor test accuracy, %" in heading
    assert any(line.startswith("| Calibre | 1 | 1 | 3 | fine-tuned | **62.50** |") for line in lines)
    assert any(line.startswith("| Script-Fair | 1 | 0 | 2 | fine-tuned | 37.50 |") for line in lines)


def test_a_study_without_any_finished_run_says_so(tmp_path):
    rows = [Row("FedAvg", "", (tmp_path / "a", tmp_path / "b"))]
    written = write_report(rows, tmp_path / "out", settings())
    assert "curves.png" not in [path.name for path in written]
    assert "0 of 2 runs are finished" in (tmp_path / "out" / "table.md").read_text()
    assert "0 of 2" in show(live_table(rows, settings()), 100)
    assert live_table([], settings()).row_count == 0


def test_finished_runs_without_the_headline_are_told(tmp_path):
    """They are finished, and the reader must know why the table does not have them."""
    folders = [write_run(tmp_path / "a"), write_personalized(write_run(tmp_path / "b"), [0.5, 0.75])]
    rows = [Row("FedAvg", "", (folders[0],)), Row("FedPer", "", (folders[1],))]
    text = markdown(rows, figure="personalized")
    assert "Finished runs that have no personalized accuracy are left out (FedAvg: 1)." in text
    assert "runs are finished; the table has these" not in text
    bracketed = [*rows[1:], Row("FedAvg [/b]", "", (folders[0],))]  # which is no markup
    assert "left out (FedAvg [/b]: 1)" in " ".join(
        show(live_table(bracketed, settings(figure="personalized")), 200).split()
    )
    chosen = markdown(rows, choice="validation_selected")
    assert "that have no test accuracy of the validation selected round are left out (FedAvg: 1; FedPer: 1)" in chosen
    compared = Report((MeasuredRow("FedAvg", "", (read_run(folders[0]),), 1),), settings(figure="personalized"))
    assert compared.notes()[0] == "No run has a personalized accuracy: it has no column."


def test_runs_without_accuracies_have_traffic_alone(tmp_path):
    metric = {"score": "metric", "model": "aggregated"}
    last = {"last": None, "validation_selected": None, "best_test": None}
    folder = write_run(tmp_path / "run", evaluated=metric, accuracy=last, history=[{"round": 1, "test": None}])
    text = markdown([Row("Own", "", (folder,))])
    assert "accuracy, %" not in text
    assert "| Own | 1 | 1 | 3 | aggregated | 1.00 | 3.00 | 2.00 |" in text


def test_the_latex_has_significance_and_ranking(report):
    captions = re.findall(r"\\caption\{(.*)\}", (report / "table.tex").read_text())
    for what in ("Significance: 20 clients", "Significance: few", "Ranking over 2 settings"):
        assert any(what in caption for caption in captions)
    assert sum("Holm's correction" in caption for caption in captions) == 2


def test_one_setting_is_named(rows, tmp_path):
    some = [row for row in rows if row.setting == "20 clients" and row.label != "Calibre"]
    write_report(some, tmp_path, settings())
    assert "}{20 clients}" not in (text := (tmp_path / "table.tex").read_text())
    assert re.search(r"\\caption\{.*: 20 clients\. ", text)
    assert ": 20 clients" in show(live_table(some, settings()), 250)


def show(table, width):
    file = StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()


def test_the_live_table_has_the_headline(rows):
    text = show(live_table(rows, settings()), 120)
    assert "few & more" in text
    assert "±" in text
    assert "MB to" not in text


@pytest.mark.parametrize("change", [{"choice": "first"}, {"figure": "loss"}, {"target_accuracy": 80.0}])
def test_settings_are_checked(change):
    ((name, value),) = change.items()
    with pytest.raises(ConfigurationError, match=f"{name} must be .*, got {value!r}"):
        settings(**change)


def test_a_row_of_latex_that_begins_with_a_bracket():
    table = TextTable("", ("run", "a"), ((Cell("[x] y"), Cell("[1]")),))
    assert "\n{[}x] y & [1] \\\\\n" in latex_table([table], "")


def test_published_figures_without_a_column_of_accuracy(tmp_path):
    run = read_run(write_run(tmp_path / "run", clients=(math.nan,)))
    row = MeasuredRow("FedAvg", "", (run,), planned=1, published=90.0)
    columns = block_columns([row], ReportSettings(""))
    assert block_table("", [row], columns).headings[:2] == ("run", "seeds")
    assert not any("accuracy" in column.heading for column in columns)
