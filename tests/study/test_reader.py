"""Study files: what they say, and what is wrong with them."""

import pytest
import yaml

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.study.reader import Dimension, read_study

FILE = """
title: Two methods
base: [base.yaml, {trainer: {max_epochs: 5}}]
methods:
  FedAvg: {model: {method: {class_path: FedAvg}}}
  FedPer: per.yaml
seeds: [0, 1]
scales:
  smoke: {base: {trainer: {max_epochs: 1}}, seeds: [0], methods: [FedPer]}
  paper: {}
"""


@pytest.fixture
def study_file(tmp_path):
    """Writes a study file with further keys, or with others."""
    (tmp_path / "base.yaml").write_text("model: {encoder: mlp}\n")
    (tmp_path / "per.yaml").write_text("model: {method: {class_path: FedPer}}\n")

    def write(**keys):
        content = {**yaml.safe_load(FILE), **keys}
        path = tmp_path / "two.yaml"
        path.write_text(
            yaml.safe_dump({key: value for key, value in content.items() if value != "left out"}, sort_keys=False)
        )
        return path

    return write


def test_what_a_file_says(study_file):
    study = read_study(study_file())
    assert (study.name, study.title, study.seeds, study.scale) == ("two", "Two methods", (0, 1), "")
    assert study.base == ({"model": {"encoder": "mlp"}}, {"trainer": {"max_epochs": 5}})
    assert study.methods["FedPer"] == ({"model": {"method": {"class_path": "FedPer"}}},)
    assert list(study.settings) == [""]
    assert study.scales == ("smoke", "paper")


def test_a_scale_adds_to_the_base_and_selects_methods(study_file):
    smoke = read_study(study_file(), "smoke")
    assert list(smoke.methods) == ["FedPer"]
    assert smoke.base[-1] == {"trainer": {"max_epochs": 1}}
    assert (smoke.seeds, smoke.scale) == ((0,), "smoke")
    paper = read_study(study_file(), "paper")
    assert (list(paper.methods), paper.seeds) == (["FedAvg", "FedPer"], (0, 1))


def test_a_scale_changes_one_method(study_file):
    scales = {"small": {"methods": {"FedPer": {"trainer": {"max_epochs": 2}}}}}
    small = read_study(study_file(scales=scales), "small")
    assert small.methods["FedPer"] == ({"model": {"method": {"class_path": "FedPer"}}}, {"trainer": {"max_epochs": 2}})
    assert list(small.methods) == ["FedAvg", "FedPer"]


def test_a_scale_selects_a_method_and_changes_it(study_file):
    scales = {"small": {"methods": [{"FedPer": {"trainer": {"max_epochs": 2}}}, "FedAvg"]}}
    small = read_study(study_file(scales=scales), "small")
    assert list(small.methods) == ["FedPer", "FedAvg"]
    assert small.methods["FedPer"] == ({"model": {"method": {"class_path": "FedPer"}}}, {"trainer": {"max_epochs": 2}})


def test_a_search(study_file):
    space = {
        "model.method.lr": {"low": 0.001, "high": 0.1, "log": True},
        "model.method.epochs": {"low": 1, "high": 5},
        "model.method.alignment": {"choices": [0.1, 1.0]},
    }
    search = read_study(study_file(search={"trials": 20, "space": space})).search
    assert search.trials == 20
    assert search.prune
    assert list(search.space.values()) == [
        Dimension(low=0.001, high=0.1, log=True),
        Dimension(low=1, high=5, integer=True),
        Dimension(choices=(0.1, 1.0)),
    ]


def test_one_client_and_the_share_of_all_are_different_values(study_file):
    grid = {"loop.cohort": [1, 1.0, 0.5]}
    assert read_study(study_file(grid=grid)).grid == {"loop.cohort": (1, 1.0, 0.5)}
    with pytest.raises(ConfigurationError, match="expected different values"):
        read_study(study_file(grid={"loop.cohort": [0.5, 1, 1]}))


def test_published_figures_with_and_without_settings(study_file):
    plain = read_study(study_file(published={"source": "a paper", "figures": {"FedAvg": 70}})).published
    assert (plain.source, plain.figures) == ("a paper", {"": {"FedAvg": 70.0}})
    settings = {"two classes": {}, "iid": {"data": {"init_args": {"partition": "IID"}}}}
    published = {"figures": {"iid": {"FedAvg": 70.05}}}
    found = read_study(study_file(settings=settings, published=published))
    assert found.published.figures == {"iid": {"FedAvg": 70.05}}
    assert list(found.settings) == ["two classes", "iid"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": {}}, r"two.yaml: unknown key 'method'; did you mean 'methods'\? \(known are title, base, "),
        ({"base": "bas.yaml"}, r"two.yaml: base: .*bas.yaml cannot be read as YAML: No such file"),
        ({"base": 3}, r"two.yaml: base: expected a config with keys .*, or the path of a YAML file of one, got 3"),
        (
            {"methods": {"FedAvg": {"seed_everything": 7}}},
            r"methods.FedAvg: seed_everything is the study's own",
        ),
        ({"settings": {"a": {"run_dir": "b"}}}, r"settings.a: run_dir is the study's own: give seeds, or --output"),
        ({"methods": "left out", "scales": {}}, r"two.yaml.*: methods are missing"),
        ({"methods": {}}, r"two.yaml: methods: expected at least one name with its config"),
        ({"methods": {"FedAvg": 1}}, r"two.yaml: methods.FedAvg: expected a config"),
        (
            {"methods": {"Mine": "FedAvg"}},
            r"methods.Mine: .*FedAvg cannot be read as YAML",
        ),
        ({"methods": {"Mine": {"class_path": "FedAvg"}}}, r"methods.Mine: expected a config with keys such as model"),
        (
            {"methods": {"FedAvg": {"init_args": {"lr": 1}}}},
            r"methods.FedAvg: expected a config with keys such as model",
        ),
        ({"seeds": []}, r"two.yaml: seeds: expected a list of whole numbers, got \[\]"),
        ({"seeds": [1, 1]}, r"two.yaml: seeds: expected different whole numbers"),
        ({"seeds": [0, 2**32]}, r"two.yaml: seeds.1: expected a whole number of at least 0 and below 4294967296"),
        (
            {"seeds": [0, "x"]},
            r"two.yaml: seeds.1: expected a whole number of at least 0 and below 4294967296, got 'x'",
        ),
        ({"seeds": ["0"]}, r"seeds.0: expected a whole number .*, got '0'"),
        ({"grid": {"model.method.lr": 0.1}}, r"two.yaml: grid.model.method.lr: expected a list of values, got 0.1"),
        ({"grid": {"": [1, 2]}}, r"two.yaml: grid: expected options by their paths"),
        ({"grid": {"model.method.lr": [1, 1]}}, r"two.yaml: grid.model.method.lr: expected different values"),
        ({"grid": {"model.method.lr": [2, 2.0]}}, r"two.yaml: grid.model.method.lr: expected different values"),
        (
            {"grid": {"model.method.lr": [1], "model.method.init_args.lr": [2]}},
            r"two.yaml: grid: model.method.lr and model.method.init_args.lr are one option: keep one of them",
        ),
        (
            {
                "grid": {"model.method.lr": [1]},
                "search": {"trials": 1, "space": {"model.method.init_args.lr": {"choices": [1]}}},
            },
            r"search.space: model.method.init_args.lr is in the grid, too",
        ),
        (
            {"choice": "best"},
            r"two.yaml: choice: expected one of last, validation_selected, best_test; did you mean .*, got 'best'",
        ),
        ({"figure": "personalised"}, r"figure: expected one of .*; did you mean 'personalized'\?"),
        ({"target_accuracy": 80}, r"two.yaml: target_accuracy: expected an accuracy in \(0, 1\], got 80"),
        ({"skip_training": ["FedAv"]}, r"skip_training: no method 'FedAv'; did you mean 'FedAvg'\?"),
        ({"published": {"figures": {"FedAvg": float("nan")}}}, r"FedAvg: expected a figure in %, got nan"),
        (
            {"settings": {"iid": {}}, "published": {"figures": {"FedAvg": 70}}},
            r"published.figures: no setting ''.*\(there are iid\)",
        ),
        ({"methods": {1: {}, "1": {}}, "scales": {}}, r"two.yaml: methods: the name '1' is given twice"),
        (
            {"search": {"trials": 2, "space": {"a": {"low": float("nan"), "high": 1.0}}}},
            r"search.space.a.low: expected a number, got nan",
        ),
        ({"search": {"trials": 2, "space": {"a": {"choices": [2, 2.0]}}}}, r"a.choices: expected different values"),
        ({"published": {"figures": {"FedAvg": "70"}}}, r"published.figures.FedAvg: expected a figure in %, got '70'"),
        ({"published": {"figures": {"iid": {"FedAvg": 7}}}}, r"published.figures: no setting 'iid'"),
        ({"search": {"trials": 2}}, r"two.yaml: search: expected trials, and a space with at least one option"),
        (
            {"search": {"trials": 2, "space": {"a": {"low": 2, "high": 1}}}},
            r"search.space.a: expected .* low below high",
        ),
        ({"search": {"trials": 2, "space": {"a": {"min": 2}}}}, r"search.space.a: unknown key 'min'"),
        ({"search": {"trials": 0, "space": {}}}, r"search"),
        ({"scales": {"smoke": {"methods": ["FedPr"]}}}, r"scales.smoke.methods: .*; did you mean 'FedPer'\?"),
        ({"scales": {"smoke": {"methods": [{"FedPr": {}}]}}}, r"scales.smoke.methods: .*; did you mean 'FedPer'\?"),
        ({"scales": {"smoke": {"methods": [{"FedPer": 3}]}}}, r"scales.smoke.methods.0.FedPer: expected a config"),
        (
            {"scales": {"smoke": {"methods": ["FedPer", "FedPer"]}}},
            r"scales.smoke.methods: expected different names of FedAvg, FedPer",
        ),
        ({"scales": {"smoke": {"scales": {}}}}, r"two.yaml: scales.smoke: unknown key 'scales'"),
    ],
)
def test_what_is_wrong_and_where(study_file, keys, message):
    with pytest.raises(ConfigurationError, match=message):
        read_study(study_file(**keys))


def test_a_scale_that_is_not_there(study_file):
    with pytest.raises(ConfigurationError, match=r"no scale 'smok'; it has smoke, paper; did you mean 'smoke'\?"):
        read_study(study_file(), "smok")


def test_files_that_are_no_study(tmp_path):
    with pytest.raises(ConfigurationError, match=r"missing.yaml cannot be read as YAML: No such file"):
        read_study(tmp_path / "missing.yaml")
    path = tmp_path / "twice.yaml"
    path.write_text("title: a\nseeds: [0]\nseeds: [1]\n")
    with pytest.raises(ConfigurationError, match=r"twice.yaml cannot be read as YAML: 'seeds' is given twice"):
        read_study(path)
    path.write_text("- a\n")
    with pytest.raises(ConfigurationError, match=r"twice.yaml: expected a mapping"):
        read_study(path)


def test_what_is_no_study(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {method: FedAvg}\ndata: {class_path: Digits}\n")
    with pytest.raises(ConfigurationError, match=r"run.yaml: unknown key 'model'.* \(known are title, base, "):
        read_study(path)
    with pytest.raises(ConfigurationError, match="cannot be read as YAML: Is a directory"):
        read_study(tmp_path)
