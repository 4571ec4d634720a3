"""Which run a command means, and what differs between two configs."""

import json
import warnings

import pytest
import yaml

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.changes import (
    OF_RUNS,
    check_seed,
    diff,
    distance,
    evaluated_otherwise,
    listed_some,
    record_changes,
)
from pfl_lightning.runs.files import newest_config, read_config
from pfl_lightning.runs.folder import RunFolder, runs_below


def changes(before, now):
    return diff(before, now, OF_RUNS)


def config(*, method="FedAvg", lr=0.1, seed=0, rounds=30, **more):
    return {
        "seed_everything": seed,
        "trainer": {"max_epochs": rounds, "logger": None},
        "model": {"method": {"class_path": method, "init_args": {"lr": lr}}, "seed": None},
        "data": {"class_path": "Digits"},
        "run_dir": "runs",
        "ckpt_path": None,
        **more,
    }


def write_run(folder, options, checkpoint=True):
    (folder / "checkpoints").mkdir(parents=True)
    if options is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(options))
    if checkpoint:
        (folder / "checkpoints" / "last.ckpt").touch()


def found(folder, options):
    return RunFolder(folder).find_checkpoint("last", options).parents[1].name


def test_what_differs_by_option():
    before, now = config(lr=0.1), config(lr=0.2, rounds=40, run_dir="elsewhere", ckpt_path="last")
    assert [str(change) for change in changes(before, now)] == [
        "model.method.init_args.lr: 0.1 -> 0.2",
        "trainer.max_epochs: 30 -> 40",
    ]
    assert changes(before, before) == []
    other = changes(before, config(method="FedPer"))
    assert [change.option for change in other] == ["model.method.class_path"]


def test_an_option_that_is_new_or_gone_is_named():
    before, now = config(), config(loop={"cohort": 2})
    assert [(change.option, change.before, change.now) for change in changes(before, now)] == [("loop.cohort", None, 2)]
    assert [(change.option, change.before, change.now) for change in changes(now, before)] == [("loop.cohort", 2, None)]


def test_what_both_configs_know(tmp_path):
    """``null`` or a word in place of a class is known; an option that one of them does not have may be a new one."""
    scheduler, encoder = {"class_path": "StepLR", "init_args": {"step_size": 1}}, {"class_path": "MLP"}
    before = {"model": {"method": {"lr_scheduler": None, "old": 1}, "encoder": "small_cnn"}}
    now = {"model": {"method": {"lr_scheduler": scheduler, "new": 2}, "encoder": encoder}}
    names = ("method.lr_scheduler.class_path", "encoder", "encoder.class_path")
    for one, other in ((before, now), (now, before)):
        known = {change.option.removeprefix("model."): change.known for change in changes(one, other)}
        assert all(known[name] for name in names)
        assert not known["method.old"]
        assert not known["method.new"]


def test_an_engine_that_trains_otherwise_is_another_run():
    def with_engine(**arguments):
        model = {**config()["model"], "engine": {"class_path": "TrainerEngine", "init_args": arguments}}
        return config(model=model)

    plain, defaults, short = config(), with_engine(max_steps=-1, threads=2), with_engine(max_steps=3)
    assert all(change.of_execution for change in changes(plain, defaults))
    assert [change.option for change in changes(plain, short) if not change.of_execution] == [
        "model.engine.init_args.max_steps"
    ]


def test_a_sentence_stays_short():
    many = changes({"data": {}}, {"data": {str(number): "x" * 200 for number in range(20)}})
    assert len(listed_some(many)) < 700
    assert listed_some(many).endswith("; and 14 more")


@pytest.mark.parametrize(
    ("trial", "wanted"),
    [({"lr": 0.5}, "version_0"), ({"rounds": 2}, "version_0"), ({"seed": 1}, "version_0"), ({}, "version_1")],
    ids=["another rate", "fewer rounds", "another seed", "the same"],
)
def test_the_run_is_that_of_the_config(tmp_path, trial, wanted):
    write_run(tmp_path / "version_0", config())
    write_run(tmp_path / "version_1", config(**trial))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(tmp_path, config(ckpt_path="last")) == wanted
        assert found(tmp_path, config(**trial)) == "version_1"
    assert RunFolder(tmp_path).find_checkpoint("last").parents[1].name == "version_1"  # without a config the newest


def with_engine(options, engine, root):
    data = {**options["data"], "init_args": {"root": root}}
    return {**options, "model": {**options["model"], "engine": engine, "spill_dir": root}, "data": data}


def test_another_engine_and_other_folders_make_no_other_run(tmp_path):
    processes = {"class_path": "pfl_lightning.ProcessEngine", "init_args": {"workers": 2}}
    write_run(tmp_path / "version_0", with_engine(config(), None, "data"))
    write_run(tmp_path / "version_1", with_engine(config(rounds=2), processes, "elsewhere"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(tmp_path, with_engine(config(), processes, "elsewhere")) == "version_0"


def test_of_equal_runs_that_on_the_command_s_data_is_taken(tmp_path):
    for number, root in enumerate(("a", "b", "c")):
        write_run(tmp_path / f"version_{number}", with_engine(config(), None, root))
    for number, root in enumerate(("a", "b", "c")):
        assert found(tmp_path, with_engine(config(), None, root)) == f"version_{number}"
    assert found(tmp_path, with_engine(config(), None, "moved")) == "version_2"


def test_what_an_evaluation_has_otherwise(tmp_path):
    write_run(tmp_path / "version_0", with_engine(config(), None, "a"))
    same = with_engine(config(rounds=60), {"class_path": "pfl_lightning.RayEngine"}, "b")
    assert evaluated_otherwise(tmp_path / "version_0", same) == []
    [change] = evaluated_otherwise(tmp_path / "version_0", with_engine(config(lr=0.5), None, "a"))
    assert (change.option, change.before, change.now) == ("model.method.init_args.lr", 0.1, 0.5)
    assert evaluated_otherwise(tmp_path / "version_7", config()) == []


def test_clipping_makes_another_run(tmp_path):
    clipped = {"class_path": "pfl_lightning.SequentialEngine", "init_args": {"gradient_clip_val": 1.0}}
    write_run(tmp_path / "version_0", with_engine(config(), clipped, "data"))
    write_run(tmp_path / "version_1", with_engine(config(), None, "data"))
    assert found(tmp_path, with_engine(config(), clipped, "data")) == "version_0"


def test_the_nearest_run_is_taken_and_what_differs_is_said(tmp_path):
    write_run(tmp_path / "version_0", config())
    write_run(tmp_path / "version_1", config(method="FedPer", lr=0.5))
    with pytest.warns(
        UserWarning, match=r"no run in .* using the nearest, \S+version_0, .*init_args\.lr: 0\.1 -> 0\.2"
    ):
        assert found(tmp_path, config(lr=0.2)) == "version_0"


def test_more_rounds_of_the_only_such_run_need_no_warning(tmp_path):
    write_run(tmp_path / "version_0", config())
    write_run(tmp_path / "version_1", config(lr=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(tmp_path, config(rounds=60)) == "version_0"


def test_a_resumed_run_is_found_by_either_config(tmp_path):
    run = tmp_path / "version_0"
    write_run(run, config())
    (run / "config-resumed-1.yaml").write_text(yaml.safe_dump(config(rounds=60)))
    assert newest_config(run).name == "config-resumed-1.yaml"
    assert distance(run, config()) == distance(run, config(rounds=60)) == (0, 0, False)


@pytest.mark.parametrize("content", [None, "", "a: [", "text"])
def test_a_run_whose_config_cannot_be_read_comes_last(tmp_path, content):
    write_run(tmp_path / "version_0", config(lr=0.7))
    write_run(tmp_path / "version_1", None)
    if content is not None:
        (tmp_path / "version_1" / "config.yaml").write_text(content)
    with pytest.warns(UserWarning, match="using the nearest"):
        assert found(tmp_path, config()) == "version_0"
    assert read_config(tmp_path / "version_1" / "config.yaml") == {}


def test_a_run_of_the_config_that_has_no_checkpoint_is_named(tmp_path):
    write_run(tmp_path / "version_0", config())
    write_run(tmp_path / "version_1", config(), checkpoint=False)
    with pytest.warns(UserWarning, match="version_1 has no such checkpoint; using .*version_0"):
        assert found(tmp_path, config()) == "version_0"


def test_changes_are_added_to_those_of_before(tmp_path):
    for number, rounds in enumerate((40, 40, 50), start=1):
        saved = tmp_path / f"config-resumed-{number}.yaml"
        before = read_config(newest_config(tmp_path)) or config()
        saved.write_text(yaml.safe_dump(config(rounds=rounds)))
        record_changes(tmp_path, saved, before, round=10 * number)
    entries = json.loads((tmp_path / "changes.json").read_text())
    assert [(entry["config"], entry["from_round"]) for entry in entries] == [
        ("config-resumed-1.yaml", 10),
        ("config-resumed-3.yaml", 30),
    ]
    assert entries[1]["changes"] == [{"option": "trainer.max_epochs", "before": 40, "now": 50, "known": True}]


@pytest.mark.parametrize("content", [b"[{", b"{}", b"\xff"])
def test_damaged_changes_are_named(tmp_path, content):
    (tmp_path / "changes.json").write_bytes(content)
    saved = tmp_path / "config-resumed-1.yaml"
    saved.write_text(yaml.safe_dump(config(rounds=40)))
    with pytest.raises(ConfigurationError, match=r"changes\.json is not a valid file of a run .* or remove it"):
        record_changes(tmp_path, saved, config(), round=2)
    assert (tmp_path / "changes.json").read_bytes() == content


def test_a_run_has_one_seed(tmp_path):
    write_run(tmp_path, config(seed=3))
    check_seed(tmp_path, config(seed=3))
    check_seed(tmp_path, config(seed=5) | {"model": {"seed": 3}})
    with pytest.raises(ConfigurationError, match=r"has the seed 3, but would resume with the seed 4: .*_everything 3"):
        check_seed(tmp_path, config(seed=4))


def test_runs_go_below_a_local_root():
    assert runs_below("runs", None).as_posix() == "runs"
    assert runs_below("runs/a", "/data").as_posix() == "/data/runs/a"
    assert runs_below("/own", "/data").as_posix() == "/own"
    assert runs_below("runs", "s3://bucket/x").as_posix() == "runs"
