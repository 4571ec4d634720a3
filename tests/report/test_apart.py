"""What a comparison must not mix: runs that look alike, settings of a study, unfinished runs."""

import json
import math
import warnings

import pytest
from _helpers.finished import write_run

from pfl_lightning.errors import ConfigurationError, UsageError
from pfl_lightning.report import ReportSettings, Row, read_run
from pfl_lightning.report.grouping import group_runs
from pfl_lightning.report.rows import measure, with_figure


def rows(*paths, labels=None):
    return group_runs(map(read_run, paths), labels)


def found(*paths):
    """Setting, label and means of the runs of each row."""
    return [(row.setting, row.label, [run.test.mean for run in row.runs]) for row in rows(*paths)]


def of_encoder(name):
    return {"model": {"encoder": {"class_path": name}}}


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"loop": {"cohort": 1}}, {"loop": {"cohort": 1.0}}, ["FedAvg, cohort=1", "FedAvg, cohort=1.0"]),
        (
            of_encoder("models.small.Net"),
            of_encoder("models.big.Net"),
            ["FedAvg, class=models.small.Net", "FedAvg, class=models.big.Net"],
        ),
        (
            {"trainer": {"limit_train_batches": None}},
            {"trainer": {"limit_train_batches": 2}},
            ["FedAvg", "FedAvg, limit_train_batches=2"],
        ),
    ],
    ids=["a client or all clients", "classes of one name", "batches of each client"],
)
def test_runs_of_equal_seeds_that_differ_are_rows_of_their_own(tmp_path, one, other, names):
    paths = [write_run(tmp_path / f"version_{n}", config=config) for n, config in enumerate((one, other))]
    assert [row.label for row in rows(*paths)] == names


def test_classes_of_this_package_are_known_by_their_names(tmp_path):
    paths = [
        write_run(tmp_path / f"version_{n}", seed=n, config=of_encoder(f"pfl_lightning.{where}.ResNet18"))
        for n, where in enumerate(("encoders", "encoders.resnet"))
    ]
    assert len(rows(*paths)) == 1


def test_runs_of_scripts_with_equal_seeds_in_two_folders_are_two_rows(tmp_path):
    """What else they had is not known."""
    paths = [write_run(tmp_path / name, clients=[value]) for name, value in (("small/v", 0.25), ("large/v", 0.5))]
    labels = [f"FedAvg ({path.as_posix()})" for path in paths]
    assert found(*paths) == [("", labels[0], [0.25]), ("", labels[1], [0.5])]
    seeds = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("seed_0", "seed_1"))]
    assert len(rows(*seeds)) == 1


def test_a_run_that_another_folders_run_replaces_is_named(tmp_path):
    paths = [write_run(tmp_path / name / "version_0", config={}, clients=[0.5]) for name in ("first", "second")]
    configs = [{"loop": {"cohort": 0.5}, "run_dir": str(path.parent)} for path in paths]
    for path, config in zip(paths, configs, strict=True):
        write_run(path, config=config)
    with pytest.warns(UserWarning, match=r"first/version_0 is left out: .*second/version_0 has the same options"):
        (row,) = rows(*paths)
    assert [run.path for run in row.runs] == [paths[1]]
    versions = [write_run(tmp_path / "third" / f"version_{n}", config=configs[0]) for n in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows(*versions)  # repetitions of a run, as documented


def test_seeds_that_ended_early_are_one_row(tmp_path):
    config = {"trainer": {"max_epochs": 9}}
    early = [
        write_run(tmp_path / f"version_{seed}", seed=seed, config=config, curve=[0.5] * rounds)
        for seed, rounds in enumerate((5, 9, 6))
    ]
    assert [(row.label, len(row.runs)) for row in rows(*early)] == [("FedAvg", 3)]
    longer = write_run(tmp_path / "resumed", seed=3, config=config, curve=[0.5] * 12)
    assert [len(row.runs) for row in rows(*early, longer)] == [3, 1]


def test_a_run_that_went_on_with_other_options_is_a_row_of_its_own(tmp_path):
    config = {"model": {"method": {"class_path": "FedAvg", "init_args": {"lr": 0.05}}}, "trainer": {"max_epochs": 5}}
    plain, changed, longer = (
        write_run(tmp_path / f"version_{seed}", seed=seed, config=config, curve=[0.5] * 5) for seed in range(3)
    )
    for run, option in ((changed, "model.method.init_args.lr"), (longer, "trainer.max_epochs")):
        entry = {"config": "config-resumed-1.yaml", "from_round": 4}
        entry["changes"] = [{"option": option, "before": 0.05, "now": 0.2}, {"option": "data.init_args.root"}]
        (run / "changes.json").write_text(json.dumps([entry]))
    found = rows(plain, changed, longer)
    assert [[run.path for run in row.runs] for row in found] == [[plain, longer], [changed]]
    assert found[1].label.endswith("lr=0.05 -> 0.2 from round 4")
    (changed / "changes.json").write_text("{")  # as if it were not there, the run would be one of the others
    with pytest.raises(ConfigurationError, match=r"changes\.json is not a valid file of a run"):
        rows(plain, changed, longer)


@pytest.mark.parametrize(("known", "count"), [(True, 2), (False, 1), (None, 1)])
def test_an_option_that_was_null_before_a_resumption(tmp_path, known, count):
    """It may as well be one that a later version of the package has added; files of earlier ones do not say."""
    config = {"model": {"method": {"class_path": "FedAvg", "init_args": {"lr": 0.05}}}, "trainer": {"max_epochs": 5}}
    plain, other = (write_run(tmp_path / f"v_{s}", seed=s, config=config, curve=[0.5] * 5) for s in range(2))
    change = {"option": "model.method.init_args.lr_scheduler.class_path", "before": None, "now": "StepLR"}
    change |= {} if known is None else {"known": known}
    (other / "changes.json").write_text(json.dumps([{"from_round": 2, "changes": [change]}]))
    assert len(rows(plain, other)) == count
    change = {"option": "model.engine.init_args.gradient_clip_val", "before": None, "now": 0.01}
    (other / "changes.json").write_text(json.dumps([{"from_round": 2, "changes": [change]}]))
    assert len(rows(plain, other)) == 2  # a default of a new option would not clip


def test_engines_that_train_otherwise_are_apart(tmp_path):
    def run(place, **arguments):
        config = {"model": {"engine": {"class_path": "TrainerEngine", "init_args": arguments}}}
        return write_run(tmp_path / f"version_{place}", seed=place, config=config)

    plain = run(0)
    defaults = run(1, accumulate_grad_batches=1, max_steps=-1, callbacks=[], limit_train_batches=None, threads=2)
    apart = [
        run(2, max_steps=1),
        run(3, accumulate_grad_batches=4),
        run(4, callbacks=[{"class_path": "Mine"}]),
        run(5, gradient_clip_val=1.0),
        run(6, engine={"class_path": "TrainerEngine", "init_args": {"limit_train_batches": 2}}),
    ]
    assert [[one.path for one in row.runs] for row in rows(plain, defaults, *apart)] == [
        [plain, defaults],
        *([one] for one in apart),
    ]


def test_rounds_are_those_of_the_last_resumption(tmp_path):
    def run(seed, planned, played, resumed=None):
        config = {"trainer": {"max_epochs": planned}}
        folder = write_run(tmp_path / f"version_{seed}", seed=seed, config=config, curve=[0.5] * played)
        if resumed is not None:
            change = {"option": "trainer.max_epochs", "before": planned, "now": resumed, "known": True}
            (folder / "changes.json").write_text(json.dumps([{"from_round": 2, "changes": [change]}]))
        return folder

    thirty, fewer, early, ten = run(0, 30, 30), run(1, 30, 20, 20), run(2, 10, 15, 30), run(3, 10, 10)
    found = [[one.path for one in row.runs] for row in rows(thirty, fewer, early, ten)]
    assert found == [[thirty, early], [fewer], [ten]]


@pytest.mark.filterwarnings("ignore:.*is not finished")
def test_unfinished_runs_are_none_of_the_finished_ones(tmp_path):
    config = {"loop": {"cohort": 0.5}}
    done = write_run(tmp_path / "version_0", config=config, clients=[0.5], curve=[0.5] * 3)
    stopped = [
        write_run(
            tmp_path / f"version_{1 + seed}", seed=seed, config=config, clients=[0.1], curve=[0.1] * 3, finished=False
        )
        for seed in range(2)
    ]
    assert found(done, *stopped) == [("", "FedAvg", [0.5]), ("", "FedAvg, unfinished", [0.1, 0.1])]


def in_study(study, setting, row="FedAvg", value=0.5, seed=0):
    folder = study / "runs" / setting / row / f"seed_{seed}"
    path = write_run(folder / "version_0", config={"model": {"encoder": setting}}, clients=[value], seed=seed)
    (folder / "run.yaml").write_text("{}")
    return path


def test_settings_of_a_study_stay_apart_beside_other_runs(tmp_path):
    study = [in_study(tmp_path / "study", setting, value=value) for setting, value in (("full", 0.5), ("half", 0.25))]
    other = write_run(tmp_path / "version_0", "FedPAC", clients=[0.75], config={"model": {"encoder": "full"}})
    blocks = [setting for setting, *_ in found(*study, other)]
    assert blocks == ["Digits, Dirichlet", "Digits, Dirichlet", "half: Digits, Dirichlet"]
    assert [means for *_, means in found(*study, other)] == [[0.5], [0.75], [0.25]]


def test_rows_of_studies_with_folders_of_one_name_are_told_apart(tmp_path):
    paths = [in_study(tmp_path / where / "digits", "all", value=value) for where, value in (("a", 0.5), ("b", 0.25))]
    for number, path in enumerate(paths):
        (path / "config.yaml").write_text(json.dumps({"model": {"encoder": str(number)}}) + "\n")
    assert [label for _, label, _ in found(*paths)] == ["FedAvg, encoder=0", "FedAvg, encoder=1"]


def test_further_runs_in_a_folder_of_a_study_are_named_by_their_options(tmp_path):
    first = in_study(tmp_path / "study", "all", value=0.5)
    second = write_run(first.with_name("version_1"), config={"model": {"encoder": "other"}}, clients=[0.25])
    assert [label for _, label, _ in found(first, second)] == ["FedAvg, encoder=all", "FedAvg, encoder=other"]


def test_two_rows_of_a_table_cannot_have_one_label(tmp_path):
    paths = [write_run(tmp_path / name, name) for name in ("FedAvg", "FedPAC")]
    with pytest.raises(UsageError, match="--labels: 2 rows would be called 'X'"):
        rows(*paths, labels=["X", "X"])


def test_seeds_without_the_figure_are_left_out_of_its_row(tmp_path):
    paths = [write_run(tmp_path / f"version_{seed}", seed=seed, config={}) for seed in range(3)]
    group = {"num_clients": 3, "mean": 0.75, "std": 0.0, "variance": 0.0, "worst_decile": 0.75}
    for path in paths[:2]:
        (path / "personalized.json").write_text(json.dumps({"participating": group}))
    (row,) = rows(*paths)
    shown = with_figure(row, "personalized")
    assert (len(shown.runs), shown.planned, shown.without) == (2, 2, 1)
    assert shown.headline("personalized").mean == 0.75
    assert with_figure(row, "personalized_novel") is row


def test_a_damaged_run_costs_a_study_its_row_alone(tmp_path):
    good, damaged = (write_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    (damaged / "clients.csv").write_text("client,test_accuracy_last\n0,much\n")
    settings = ReportSettings("A study")
    with pytest.warns(UserWarning, match=r"left out of the table: .*b/clients\.csv is not a valid file of a run"):
        (row,) = measure([Row("FedAvg", "", (good, damaged))], settings)
    assert (len(row.runs), row.planned) == (1, 2)
    with pytest.raises(ConfigurationError, match=r"clients\.csv"):
        read_run(damaged)


def test_a_later_test_counts_where_no_round_was_evaluated(tmp_path):
    run = write_run(tmp_path / "run", curve=[0.5] * 10)
    results = json.loads((run / "results.json").read_text())
    results["accuracy"] = {"last": None, "validation_selected": None, "best_test": None}
    (run / "results.json").write_text(json.dumps(results))
    tested = {"mean": 0.75, "std": 0.0, "worst_decile": 0.75, "num_clients": 3}
    for rounds, mean in ((10, 0.75), (7, math.nan)):
        last = {"round": rounds, "test": tested}
        content = {"evaluated": {"score": "classifier", "model": "aggregated"}, "accuracy": {"last": last}}
        (run / "test.json").write_text(json.dumps(content))
        assert read_run(run).test.mean == pytest.approx(mean, nan_ok=True)
