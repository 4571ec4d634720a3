"""The runs that a study consists of."""

import warnings

import pytest
from _helpers.studies import write_study

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.config import option_of
from pfl_lightning.study.plan import plan_cells, plan_runs
from pfl_lightning.study.reader import read_study


def planned(tmp_path, words=(), **keys):
    study = read_study(write_study(tmp_path, **keys))
    return plan_runs(study, plan_cells(study, words), tmp_path / "out")


def test_settings_methods_and_seeds(tmp_path):
    settings = {"two clients": {"data": {"init_args": {"partition": {"init_args": {"num_clients": 2}}}}}, "three": {}}
    runs = planned(tmp_path, settings=settings, seeds=[3, 4])
    assert [run.name for run in runs[:4]] == [
        *("FedAvg (two clients), seed 3", "FedPer (two clients), seed 3"),
        *("FedAvg (three), seed 3", "FedPer (three), seed 3"),
    ]
    assert len(runs) == 8
    first = runs[0]
    assert first.folder == tmp_path / "out" / "runs" / "two-clients" / "FedAvg" / "seed_3"
    assert first.config["run_dir"] == str(first.folder)
    assert option_of(first.config, "data.partition.num_clients") == 2
    assert first.config["seed_everything"] == option_of(first.config, "data.partition.seed") == 3
    assert option_of(first.config, "data.seed") is None  # the config has none
    assert first.config["model"]["method"] == {"init_args": {"lr": 0.05, "epochs": 1}, "class_path": "FedAvg"}
    assert first.rounds == 2


def test_named_seed_options(tmp_path):
    config = planned(tmp_path, seeds=[7], seed_options=["data.init_args.seed"])[0].config
    assert option_of(config, "data.seed") == 7
    assert "seed_everything" not in config
    assert option_of(config, "data.partition.seed") == 0


def test_a_grid_makes_rows(tmp_path):
    grid = {"model.method.init_args.lr": [0.1, 0.2], "model.encoder": ["mlp", "small_cnn"]}
    runs = planned(tmp_path, methods={"FedAvg": {"model": {"method": "FedAvg"}}}, grid=grid)
    assert [run.cell.label for run in runs][:2] == ["FedAvg, lr=0.1, encoder=mlp", "FedAvg, lr=0.1, encoder=small_cnn"]
    assert runs[2].config["model"]["encoder"] == "mlp"
    assert runs[2].config["model"]["method"] == {"init_args": {"lr": 0.2, "epochs": 1}, "class_path": "FedAvg"}
    assert runs[0].folder.parent.name == "FedAvg-lr=0.1-encoder=mlp"


def test_the_order_of_a_grids_options_makes_no_difference(tmp_path):
    lr, method = ("model.method.init_args.lr", [0.1, 0.2]), ("model.method", ["FedAvg", "FedPAC"])
    for grid in (dict([lr, method]), dict([method, lr])):
        runs = planned(tmp_path, methods={"M": {}}, grid=grid)
        assert {(one.config["model"]["method"]["class_path"], option_of(one.config, lr[0])) for one in runs} == {
            (name, rate) for name in method[1] for rate in lr[1]
        }


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (
            {"data.init_args.partition.init_args.num_clients": [2, 3]},
            [("data.init_args.partition", "{class_path: IID}")],
        ),
        ({"loop": [1, 2], "loop.cohort": [3]}, []),
    ],
)
def test_a_row_whose_label_would_not_be_true_is_refused(tmp_path, grid, words):
    with pytest.raises(ConfigurationError, match=r"of the grid would be .* in its runs, not"):
        planned(tmp_path, words, grid=grid)


@pytest.mark.parametrize(
    ("grid", "labels"),
    [
        ({"model.method.lr": ["0.01", "0.11"]}, ["FedAvg, lr=0.01", "FedAvg, lr=0.11"]),
        ({"data.root": ["a.npz", "b.npz"]}, ["FedAvg, root=a.npz", "FedAvg, root=b.npz"]),
        ({"model.encoder": ["mine.CNN", "other.MLP"]}, ["FedAvg, encoder=CNN", "FedAvg, encoder=MLP"]),
        (
            {"model.method.init_args.lr": [0.1], "personalize.lr": [0.2]},
            ["FedAvg, method.lr=0.1, personalize.lr=0.2"],
        ),
        (
            {
                "data.partition": [
                    {"class_path": "IID", "init_args": {"num_clients": 2}},
                    {"class_path": "IID", "init_args": {"num_clients": 3}},
                ]
            },
            ["FedAvg, partition=IID(num_clients=2)", "FedAvg, partition=IID(num_clients=3)"],
        ),
    ],
)
def test_labels_of_a_grid_say_which_option_has_which_value(tmp_path, grid, labels):
    runs = planned(tmp_path, methods={"FedAvg": {"model": {"method": "FedAvg"}}}, grid=grid)
    assert [run.cell.label for run in runs] == labels


def test_names_that_are_no_folders(tmp_path):
    with pytest.raises(ConfigurationError, match=r"the row '\.\.' cannot have a folder: .* with a letter or a digit"):
        planned(tmp_path, methods={"..": {}})
    with pytest.raises(ConfigurationError, match=r"the setting '\.\.' cannot have a folder"):
        planned(tmp_path, settings={"..": {}})


@pytest.mark.parametrize("path", ["seed_everything", "data.partition.seed", "data.init_args.seed"])
def test_options_that_take_the_seeds_are_not_varied_elsewhere(tmp_path, path):
    with pytest.raises(ConfigurationError, match=f"--{path} takes the seeds of the study.*: set seeds"):
        planned(tmp_path, [(path, "5")])
    with pytest.raises(ConfigurationError, match=f"{path} of the study's grid takes the seeds of the study"):
        planned(tmp_path, grid={path: [1, 2]})
    search = {"trials": 1, "space": {path: {"choices": [1, 2]}}}
    with pytest.raises(ConfigurationError, match=f"{path} of the study's search takes the seeds of the study"):
        planned(tmp_path, search=search)
    assert planned(tmp_path, [(path, "5")], seed_options=["data.init_args.another"])


def test_options_of_the_command_line_win(tmp_path):
    words = [("data.root", "data"), ("trainer.max_epochs", "9"), ("model.method.init_args.lr", "1e-3")]
    run = planned(tmp_path, words)[0]
    assert option_of(run.config, "data.init_args.root") == "data"
    assert (run.rounds, option_of(run.config, "model.method.lr")) == (9, 0.001)


def test_methods_that_are_only_personalized_play_no_round(tmp_path):
    runs = planned(tmp_path, [("trainer.max_epochs", "9")], skip_training=["FedPer"])
    assert [option_of(run.config, "trainer.max_epochs") for run in runs] == [9, 0]


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        ({"class_path": "FedPer"}, {}, True),
        ("FedPer", {}, True),
        ({"class_path": "FedPer", "init_args": {"lr": 0.5}}, {}, False),
        ({"class_path": "FedAvg"}, {}, False),  # the base's own
        ("FedPer", {"grid": {"model.method.init_args.lr": [0.1, 0.2]}}, False),
    ],
    ids=["class", "name", "arguments", "same class", "grid"],
)
def test_a_row_that_loses_the_arguments_of_the_base_is_named(tmp_path, row, keys, said):
    base = {"model": {"method": {"class_path": "FedAvg", "init_args": {"lr": 0.3, "epochs": 2}}}}
    methods = {"base": {}, "row": {"model": {"method": row}}}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan_cells(read_study(write_study(tmp_path, base=base, methods=methods, **keys)))
    expected = "rows with their methods' defaults, not the base's epochs, lr: row. They name a class of their own."
    assert [str(one.message).startswith(expected) for one in found] == [True] * said


def test_rows_that_would_share_a_folder(tmp_path):
    methods = {"Fed Avg": {}, "fed, avg": {}}
    with pytest.raises(ConfigurationError, match=r"'Fed Avg' and 'fed, avg' would share the folder all/fed-avg"):
        planned(tmp_path, methods=methods)


def test_published_figures_without_a_row(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"published.figures: the table has no row 'FedPr'; did you mean 'FedP"
    ):
        planned(tmp_path, published={"figures": {"FedPr": 70}})


@pytest.mark.parametrize("what", ["grid", "search"])
def test_an_option_of_the_grid_or_the_search_is_not_given_on_the_command_line_too(tmp_path, what):
    path, lr = "model.method.init_args.lr", [0.1, 0.2]
    keys = {"grid": {path: lr}} if what == "grid" else {"search": {"trials": 2, "space": {path: {"choices": lr}}}}
    study = read_study(write_study(tmp_path, **keys))
    with pytest.raises(ConfigurationError, match=rf"--model.method.lr is an option of the study's {what}: change"):
        plan_cells(study, [("model.method.lr", "0.3")])
    assert plan_cells(study, [("model.method.epochs", "3")])


def test_an_option_is_in_the_grid_or_searched(tmp_path):
    path = "model.method.init_args.lr"
    search = {"trials": 2, "space": {path: {"choices": [0.1]}}}
    with pytest.raises(ConfigurationError, match=r"search.space: model.method.init_args.lr is in the grid, too"):
        read_study(write_study(tmp_path, grid={path: [0.1]}, search=search))
