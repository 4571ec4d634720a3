"""Which runs are one row, which stand in a table of their own, and what rows are called."""

import pytest
from _helpers.finished import write_run

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.report import read_run
from pfl_lightning.report.grouping import group_runs
from pfl_lightning.runs.config import differing, flatten, run_options, short_names


def config(**options):
    """A config as `pfl fit` leaves it, with some options changed: by name below the method, or `data__NAME`."""
    method = {"lr": 0.1, "epochs": 5, "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"nesterov": True}}}
    partition = {"num_clients": 3, "alpha": 0.5, "seed": 0}
    data = {"batch_size": 10, "validation_share": 0.1, "seed": 0, "root": "data"}
    rest = {"model": {"encoder": "small_cnn"}, "loop": {"cohort": 1.0}, "personalize": None}
    for name, value in options.items():
        kind, _, key = name.rpartition("__")
        below = {"": method, "data": data, "partition": partition, "loop": rest["loop"], "model": rest["model"]}
        below[kind][key] = value
    data["partition"] = {"class_path": "pfl.Dirichlet", "init_args": partition}
    rest["model"]["method"] = {"class_path": "pfl.FedAvg", "init_args": method}
    return {"seed_everything": 0, "run_dir": "runs", "data": {"class_path": "pfl.Digits", "init_args": data}, **rest}


def group(paths, labels=None):
    return [(row.setting, row.label, len(row.runs)) for row in group_runs(map(read_run, paths), labels)]


def labels(tmp_path, *configs, methods=None, **changes):
    """Of runs with these configs."""
    methods = methods or ["FedAvg"] * len(configs)
    pairs = enumerate(zip(configs, methods, strict=True))
    paths = [write_run(tmp_path / f"version_{n}", method, config=one, **changes) for n, (one, method) in pairs]
    return [label for _, label, _ in group(paths)]


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
    assert len(group(paths)) == rows


def test_of_two_runs_with_equal_seeds_the_later_counts(tmp_path):
    paths = [write_run(tmp_path / f"version_{n}", clients=[value], config={}) for n, value in ((0, 0.25), (1, 0.5))]
    (row,) = group_runs(map(read_run, paths))
    assert [run.path for run in row.runs] == [paths[1]]
    assert row.headline("test").mean == 0.5


def test_runs_under_an_attack_are_rows_of_their_own(tmp_path):
    """Whoever lies, which may follow the seed; their accuracies are those of the honest clients."""
    attacks = [None, {"kind": "sign_flip", "scale": None, "liars": [1]}, {"kind": "none", "scale": None, "liars": [1]}]
    paths = []
    for seed in (0, 1):
        for place, attack in enumerate(attacks):
            own = attack and {**attack, "liars": [seed]}
            paths.append(write_run(tmp_path / f"{seed}{place}", seed=seed, config=config(), attack=own))
    found = group_runs(map(read_run, paths))
    assert [len(row.runs) for row in found] == [2, 2, 2]
    assert ["sign_flip" in row.label for row in found] == [False, True, False]
    assert len({row.label for row in found}) == 3


def test_rows_are_named_by_the_options_that_differ(tmp_path):
    assert labels(tmp_path / "1", config(lr=0.01), config(lr=0.02)) == ["FedAvg, lr=0.01", "FedAvg, lr=0.02"]
    assert labels(tmp_path / "2", config(), config(lr=0.02, loop__cohort=0.5)) == [
        "FedAvg, lr=0.1, cohort=1.0",
        "FedAvg, lr=0.02, cohort=0.5",
    ]
    adam = {"class_path": "torch.optim.Adam", "init_args": {"amsgrad": True}}
    assert labels(tmp_path / "3", config(), config(optimizer=adam)) == [
        "FedAvg, optimizer=SGD",
        "FedAvg, optimizer=Adam",
    ]


def test_methods_are_named_by_what_else_differs(tmp_path):
    plain = labels(tmp_path / "1", config(), config(epochs=9), methods=["FedAvg", "FedPAC"])
    assert plain == ["FedAvg", "FedPAC"]  # their options are theirs
    larger = labels(tmp_path / "2", config(), config(model__encoder="resnet18"), methods=["FedAvg", "FedPAC"])
    assert larger == ["FedAvg, encoder=small_cnn", "FedPAC, encoder=resnet18"]


def test_what_a_run_without_a_config_had_names_no_row(tmp_path):
    paths = [
        write_run(tmp_path / "a", config=config(lr=0.3)),
        write_run(tmp_path / "b"),
        write_run(tmp_path / "c", "FedPAC", config=config()),
    ]
    assert [label for _, label, _ in group(paths)] == ["FedAvg, lr=0.3", "FedAvg, lr=0.1", "FedPAC"]


def test_rounds_name_runs_of_one_method(tmp_path):
    paths = [write_run(tmp_path / str(n), curve=[0.5] * n, config=config()) for n in (2, 3)]
    assert [label for _, label, _ in group(paths)] == ["FedAvg, rounds=2", "FedAvg, rounds=3"]


def test_folders_name_rows_only_where_no_option_differs():
    paths = ["model.method.optimizer.lr", "model.method.lr", "data.augment.0.degrees"]
    assert list(short_names(paths).values()) == ["optimizer.lr", "method.lr", "degrees"]
    assert differing([{"a": 1}, {"a": 1}]) == []
    nested = [{"class_path": "torch.Crop", "init_args": {"size": [1, 2]}}, {"class_path": "torch.Flip"}]
    assert flatten("data.augment", nested) == {
        "data.augment.0": "Crop",
        "data.augment.0.size": [1, 2],
        "data.augment.1": "Flip",
    }


SAME = ["Digits, Dirichlet (1)", "Digits, Dirichlet (2)"]


@pytest.mark.parametrize(
    ("changes", "titles"),
    [
        ({"data": {"name": "CIFAR10", "fingerprint": "sha256:c"}}, ["Digits, Dirichlet", "CIFAR10, Dirichlet"]),
        (
            {"data": {"name": "Digits", "fingerprint": "sha256:other"}},
            SAME,
        ),
        (
            {"partition": {"name": "Dirichlet", "fingerprint": "sha256:p9"}},
            SAME,
        ),
    ],
)
def test_runs_of_other_data_or_partitions_have_a_table_of_their_own(tmp_path, changes, titles):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)]
    found = group(paths)
    assert [label for _, label, _ in found] == ["FedAvg", "FedAvg"]
    assert len({setting for setting, _, _ in found}) == 2
    for (setting, _, _), title in zip(found, titles, strict=True):
        assert title in setting


def test_partitions_of_other_options_have_a_table_of_their_own(tmp_path):
    unknown = {"name": "Dirichlet", "fingerprint": None}
    paths = [
        write_run(tmp_path / str(alpha), config=config(partition__alpha=alpha), partition=unknown)
        for alpha in (0.1, 0.5)
    ]
    assert group(paths) == [
        ("Digits, Dirichlet, alpha=0.1", "FedAvg", 1),
        ("Digits, Dirichlet, alpha=0.5", "FedAvg", 1),
    ]


def test_seeds_with_partitions_of_their_own_are_one_row(tmp_path):
    paths = [
        write_run(tmp_path / str(seed), seed=seed, config=config(partition__seed=seed, data__seed=seed))
        for seed in range(3)
    ]
    assert group(paths) == [("", "FedAvg", 3)]


def test_a_partition_from_a_file_is_the_same_if_its_content_is(tmp_path):
    from_file = config()
    from_file["data"]["init_args"]["partition"] = {"class_path": "pfl.FromFile", "init_args": {"path": "p.npz"}}
    paths = [
        write_run(tmp_path / "a", config=config()),
        write_run(
            tmp_path / "b",
            "FedPAC",
            config=from_file,
            partition={"name": "FromFile", "fingerprint": "sha256:p0"},
        ),
    ]
    assert {setting for setting, _, _ in group(paths)} == {""}


def test_labels_replace_the_names(tmp_path):
    paths = [write_run(tmp_path / name, name) for name in ("FedAvg", "FedPer")]
    assert [label for _, label, _ in group(paths, ["a", "b"])] == ["a", "b"]
    with pytest.raises(ConfigurationError, match="--labels has 1 names for 2 configurations: FedAvg; FedPer"):
        group(paths, ["a"])


@pytest.mark.parametrize(
    ("engine", "label"),
    [
        ({"class_path": "pfl.SequentialEngine", "init_args": {"gradient_clip_val": 10.0}}, "gradient_clip_val=10"),
        ({"class_path": "pfl.RayEngine", "init_args": {"engine": {"init_args": {"gradient_clip_val": 2}}}}, "val=2"),
        ({"class_path": "pfl.RayEngine", "init_args": {"workers": 2, "engine": None}}, None),
        ({"class_path": "pfl.SequentialEngine", "init_args": {"gradient_clip_algorithm": "value"}}, None),
    ],
)
def test_clipping_of_the_engine_tells_runs_apart(tmp_path, engine, label):
    """`pfl fit` moves the Trainer's clipping to the engine; the engine itself makes no difference."""
    plain = {"class_path": "pfl.SequentialEngine", "init_args": {"gradient_clip_val": None}}
    configs = [config(model__engine=plain), config(model__engine=engine)]
    paths = [write_run(tmp_path / f"version_{n}", config=one, seed=n) for n, one in enumerate(configs)]
    found = group_runs(map(read_run, paths))
    assert len(found) == (2 if label else 1)
    assert label is None or any(row.label.endswith(label) for row in found)


def test_how_gradients_are_clipped():
    engine = {"init_args": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}}
    options = run_options({"model": {"method": {}, "engine": engine}}, "FedAvg", {}, 1)
    assert options["trainer.gradient_clip_algorithm"] == "value"


@pytest.mark.parametrize(("seeds", "others"), [([0], [0, 1, 2]), ([0, 1], [0, 1, 2]), ([3], [0, 1]), ([0, 1, 2], [3])])
def test_without_configs_a_partition_of_several_seeds_is_one_of_its_own(tmp_path, seeds, others):
    """Runs of scripts of two partitions, which do not follow the seed: their options are not known."""
    paths = [
        write_run(
            tmp_path / f"{name}_{seed}" / "version_0",
            clients=clients,
            seed=seed,
            partition={"name": "Dirichlet", "fingerprint": f"sha256:{name}"},
        )
        for name, some, clients in (("a", seeds, (0.9, 0.9)), ("b", others, (0.5, 0.7)))
        for seed in some
    ]
    for order in (paths, paths[::-1], sorted(paths, key=lambda path: path.parent.name[-1])):
        rows = group_runs(map(read_run, order))
        assert sorted(len(row.runs) for row in rows) == sorted([len(seeds), len(others)])
        assert all(len({run.partition.fingerprint for run in row.runs}) == 1 for row in rows)


def test_rows_of_one_name_in_two_studies_say_what_differs(tmp_path):
    paths = []
    for study, options in (("A", {}), ("B", {"lr": 0.5, "model__encoder": "mlp"})):
        folder = tmp_path / study / "runs" / "all" / "FedAvg" / "seed_0"
        paths.append(write_run(folder / "version_0", config=config(**options)))
        (folder / "run.yaml").write_text("{}")
    expected = ["FedAvg, lr=0.1, encoder=small_cnn", "FedAvg, lr=0.5, encoder=mlp"]
    assert [label for _, label, _ in group(paths)] == expected
