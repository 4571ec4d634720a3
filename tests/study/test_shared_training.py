"""Of runs that differ in what clients do after the last round, one trains."""

import json
from dataclasses import replace

import pytest
from _helpers import studies
from _helpers.studies import Notes, PretendedStarter, StarterHere, finish, write_study

from pfl_lightning.cli import main
from pfl_lightning.jobs import supervision
from pfl_lightning.runs.reading import read_run
from pfl_lightning.study import plan_cells, plan_runs, read_study
from pfl_lightning.study.definition.options import with_option
from pfl_lightning.study.run_state import finished_folder
from pfl_lightning.study.runner import Runner
from pfl_lightning.study.shared_training import SharedTraining, Trained, settle

FEDAVG = {"model": {"method": {"class_path": "FedAvg"}}}
ROWS = {
    "head": {**FEDAVG, "personalize": {"train": "head", "lr": 0.1}},
    "all": {**FEDAVG, "personalize": {"train": "all", "lr": 0.1}},
    "as trained": FEDAVG,
    "FedPer": {"model": {"method": {"class_path": "FedPer"}}, "personalize": {"train": "head", "lr": 0.1}},
}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(supervision, "POLL", 0.01)
    monkeypatch.setattr(supervision, "AGAIN", 0.02)


def planned(folder, seeds=(0,)):
    folder.mkdir(exist_ok=True)
    study = read_study(write_study(folder, methods=ROWS, seeds=list(seeds)))
    return plan_runs(study, plan_cells(study), folder / "out")


@pytest.fixture
def pretended(monkeypatch):
    """Runs leave what runs with a checkpoint and a personalization do."""

    def finish_with_checkpoint(folder):
        finish(folder, rounds=2)
        (folder / "version_0" / "personalized.json").write_text("{}")
        (folder / "version_0" / "checkpoints").mkdir()
        (folder / "version_0" / "checkpoints" / "last.ckpt").touch()

    monkeypatch.setattr(studies, "finish", finish_with_checkpoint)


def names(runs):
    return [run.name for run in runs]


def test_runs_train_alike_whose_configs_differ_in_the_personalization_alone(tmp_path):
    runs = planned(tmp_path, seeds=[0, 1])
    shared = SharedTraining(runs)
    assert names(shared.others(runs[0])) == ["all, seed 0", "as trained, seed 0"]
    assert shared.others(runs[3]) == []  # FedPer
    longer = [replace(run, config=with_option(run.config, "trainer.max_epochs", 3)) for run in runs[:1]]
    assert SharedTraining([*longer, *runs[1:]]).others(runs[0]) == []


def test_one_of_them_trains_and_the_others_wait_for_it(tmp_path, pretended):
    runs, notes, starter = planned(tmp_path, seeds=[0, 1]), Notes(), PretendedStarter()
    failed = Runner(starter, notes, processes=4, shared=SharedTraining(runs)).play(runs)
    assert failed == {}
    started = [(kind, *found) for kind, *found in notes.events if kind != "finished"]
    assert sorted(started) == [
        *(("resumed", f"{row}, seed {seed}", f"head, seed {seed}") for row in ("all", "as trained") for seed in (0, 1)),
        *(("started", f"{row}, seed {seed}") for row in ("FedPer", "head") for seed in (0, 1)),
    ]
    for words in starter.commands:
        if "--ckpt_path" in words:
            assert "/head/" in words[-1]
            assert words[-1].split("/")[-4] in words[2]  # the same seed


def test_where_it_fails_another_one_trains(tmp_path, pretended):
    runs, notes = planned(tmp_path)[:3], Notes()
    failed = Runner(PretendedStarter({"head": [1]}), notes, shared=SharedTraining(runs)).play(runs)
    assert list(failed) == ["head, seed 0"]
    assert [event for event in notes.events if event[0] in ("started", "resumed")] == [
        *(("started", "head, seed 0"), ("started", "all, seed 0"), ("resumed", "as trained, seed 0", "all, seed 0"))
    ]


def test_without_a_checkpoint_every_run_trains_and_none_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "finish", lambda folder: (finish(folder, rounds=2), write_nothing(folder)))
    runs, notes, starter = planned(tmp_path)[:3], Notes(), PretendedStarter()
    Runner(starter, notes, processes=3, shared=SharedTraining(runs)).play(runs)
    assert [event[0] for event in notes.events if event[0] != "finished"] == ["started"] * 3
    assert starter.most == 2  # once the first has shown that it leaves none
    off = [replace(run, config=with_option(run.config, "trainer.enable_checkpointing", False)) for run in runs]
    assert SharedTraining(off).others(off[0]) == []


def write_nothing(folder):
    (folder / "version_0" / "personalized.json").write_text("{}")


def test_a_training_that_a_callback_has_ended_is_not_shared(tmp_path, pretended, monkeypatch):
    whole = studies.finish

    def stop_early(folder):
        whole(folder)
        finish(folder, rounds=1)

    monkeypatch.setattr(studies, "finish", stop_early)
    runs, notes = planned(tmp_path)[:2], Notes()
    Runner(PretendedStarter(), notes, shared=SharedTraining(runs)).play(runs)
    assert [event[0] for event in notes.events] == ["started", "finished"] * 2


def test_other_data_are_another_training(tmp_path):
    runs = planned(tmp_path)[:2]
    elsewhere = [replace(run, config=with_option(run.config, "data.root", f"/data/{run.cell.label}")) for run in runs]
    assert SharedTraining(elsewhere).others(elsewhere[0]) == []


def test_the_training_of_an_earlier_command_is_not_shared(tmp_path, pretended):
    """Data or code may have changed since."""
    runs, notes = planned(tmp_path)[:2], Notes()
    for some in (runs[:1], runs):
        Runner(PretendedStarter(), notes, shared=SharedTraining(runs)).play(some)
    assert ("started", "all, seed 0") in notes.events


def test_rows_do_not_wait_for_each_other_once_one_has_trained(tmp_path, pretended):
    runs, starter = planned(tmp_path)[:3], PretendedStarter()
    Runner(starter, Notes(), processes=3, shared=SharedTraining(runs)).play(runs)
    assert starter.most == 2


def test_a_row_that_cannot_go_on_trains_itself(tmp_path, pretended):
    """Such as after a checkpoint that was damaged on the way."""
    runs, notes = planned(tmp_path)[:2], Notes()
    Runner(PretendedStarter({"all": [1, 0]}), notes, retry=1, shared=SharedTraining(runs)).play(runs)
    events = [event for event in notes.events if event[0] in ("started", "resumed")]
    assert events == [
        ("started", "head, seed 0"),
        ("resumed", "all, seed 0", "head, seed 0"),
        ("started", "all, seed 0"),
    ]


def results_of(run):
    """What a run has left, without times and places."""
    folder = finished_folder(run)
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json") if path.name != "changes.json"}
    found["results.json"] = {k: v for k, v in found["results.json"].items() if not k.startswith("seconds")}
    for entry in found["results.json"]["history"]:
        del entry["seconds"]
    return {**found, **{path.name: path.read_text() for path in folder.glob("*.csv")}}


def test_the_results_are_those_of_runs_that_all_train(tmp_path):
    alone, shared = planned(tmp_path / "alone")[:3], planned(tmp_path / "shared")[:3]
    assert Runner(StarterHere(), Notes()).play(alone) == {}
    notes, starter = Notes(), StarterHere()
    assert Runner(starter, notes, shared=SharedTraining(shared)).play(shared) == {}
    assert [event[0] for event in notes.events if event[0] != "finished"] == ["started", "resumed", "resumed"]
    for one, other in zip(alone, shared, strict=True):
        assert results_of(one) == results_of(other)
        assert read_run(finished_folder(one)).options == read_run(finished_folder(other)).options
    for run in shared:  # commands find the model of every row, and its config trains
        assert "ckpt_path: null\n" in (finished_folder(run) / "config.yaml").read_text()
        assert main(["test", "--config", str(run.config_file), "--ckpt_path", "last"]) is None
        found = json.loads((finished_folder(run) / "test.json").read_text())
        assert found["accuracy"]["last"]["test"] == results_of(run)["results.json"]["accuracy"]["last"]["test"]
    tuned = [results_of(run)["personalized.json"]["participating"]["mean"] for run in shared[:2]]
    assert "personalized.json" not in results_of(shared[2])
    assert tuned[0] != tuned[1]


def test_where_links_are_not_to_be_had_checkpoints_are_copied(tmp_path, pretended, monkeypatch):
    def no_links(*paths):
        raise OSError("no links here")

    runs = planned(tmp_path)[:2]
    finish(runs[1].folder)
    (runs[1].folder / "version_0" / "personalized.json").write_text("{}")
    studies.finish(runs[0].folder)
    last = runs[0].folder / "version_0" / "checkpoints" / "last.ckpt"
    last.write_text("content")
    monkeypatch.setattr("os.link", no_links)
    settle(Trained(runs[0], last), runs[1])
    copy = runs[1].folder / "version_0" / "checkpoints" / "last.ckpt"
    assert copy.read_text() == "content"
    copy.unlink()
    monkeypatch.setattr("shutil.copyfile", no_links)
    with pytest.warns(
        UserWarning, match="all, seed 0 has no checkpoints, as those of head, seed 0 could not be copied"
    ):
        settle(Trained(runs[0], last), runs[1])
