"""What is read from the folders of finished runs, and which forms of results.json are read."""

import json
import math

import pytest
from _helpers.finished import summary, write_personalized, write_run

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.report import HistoryEntry, Source, find_runs, read_run


def test_a_run_of_the_second_form(tmp_path):
    config = {
        "seed_everything": 3,
        "data": {"class_path": "a.Digits", "init_args": {"seed": 4, "partition": {"init_args": {"seed": 5}}}},
    }
    run = read_run(write_run(tmp_path / "run", "FedPAC", seed=3, config=config, curve=[0.2, 0.5]))
    assert (run.method, run.seed, run.data_seeds, run.seeds) == ("FedPAC", 3, (5, 4), (3, 5, 4))
    assert (run.rounds, run.num_clients, run.finished) == (2, 3, True)
    assert (run.data, run.partition) == (Source("Digits", "sha256:d"), Source("Dirichlet", "sha256:p3"))
    assert (run.test.score, run.test.model) == ("classifier", "aggregated")
    assert run.test.clients == {0: 0.25, 1: 0.5, 2: 0.75}
    assert run.test.mean == 0.5
    assert run.test.worst_decile == 0.25
    assert run.history[0] == HistoryEntry(1, seconds=2.0, bytes_up=10**6, bytes_down=3 * 10**6, test=0.2)
    assert (run.bytes_up, run.bytes_down, run.seconds_per_round) == (2e6, 6e6, 2.0)
    assert run.options["model.method"] == "FedPAC"
    assert run.options["model.method.lr"] == 0.1  # no config says it
    assert run.versions == {"torch": "2.9.0"}
    assert math.isnan(run.personalized.mean)


def test_the_chosen_round_is_the_one_asked_for(tmp_path):
    folder = write_run(tmp_path / "run")
    assert read_run(folder, "best_test").test.mean == pytest.approx(0.6)
    assert read_run(folder, "best_test").test.clients[2] == pytest.approx(0.85)
    assert math.isnan(read_run(folder, "validation_selected").test.mean)  # nobody validated
    with pytest.raises(ConfigurationError, match=r"choice must be one of .*last.*got 'first'"):
        read_run(folder, "first")


def test_the_first_form_is_refused_with_the_version_that_reads_it(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"method": "FedAvg", "rounds": 1, "accuracy": {"last": None}}))
    with pytest.raises(ConfigurationError, match=r"has format 1, .*: pfl-lightning==0\.3\.0 reads format 1"):
        read_run(tmp_path)


@pytest.mark.parametrize(("round", "shown"), [(2, True), (1, True), (3, True), (4, False)])
def test_a_personalization_of_a_round_that_the_run_went_on_from_is_left_out(tmp_path, round, shown):
    """The last round, or one of those that ``best`` may mean, is as somebody asked for."""
    accuracy = {name: {"round": number, "test": None} for name, number in (("validation_selected", 3), ("last", 2))}
    folder = write_run(tmp_path, curve=[0.1, 0.2], accuracy={**accuracy, "best_test": {"round": 1, "test": None}})
    (folder / "personalized.json").write_text(json.dumps({"participating": {"mean": 0.75}, "round": round}))
    if shown:
        assert read_run(folder).personalized.mean == 0.75
        return
    with pytest.warns(UserWarning, match=r"personalized accuracies are of round 4, .*pfl personalize --ckpt_path last"):
        assert math.isnan(read_run(folder).personalized.mean)


def test_runs_below_a_folder_of_versions_are_found_too(tmp_path):
    versions = [write_run(tmp_path / f"version_{number}") for number in range(2)]
    assert find_runs(tmp_path) == versions
    write_personalized(versions[0] / "kept", [0.5])  # within a version: no run of its own
    assert find_runs(tmp_path) == versions
    other = write_run(tmp_path / "other" / "version_0")
    assert find_runs(tmp_path) == [*versions, other]


def test_a_later_test_of_the_chosen_round_stands_in_for_rounds_without_tests(tmp_path):
    """As trainer.test of a LightningModule leaves it, whose rounds evaluate the validation parts alone."""
    last = {"round": 4, "test": None, "validation": summary([0.5, 0.6])}
    accuracy = {"last": last, "validation_selected": {**last, "round": 3}, "best_test": None}
    folder = write_run(tmp_path / "run", accuracy=accuracy)
    (folder / "clients.csv").write_text("client,test_accuracy_last\n0,\n1,\n")
    assert math.isnan(read_run(folder).test.mean)

    tested = {"round": 4, "test": summary([0.25, 0.75]), "validation": None}
    evaluated = {"score": "classifier", "model": "trained"}
    (folder / "test.json").write_text(json.dumps({"accuracy": {"last": tested}, "evaluated": evaluated}))
    (folder / "test_clients.csv").write_text("client,novel,test_accuracy\n0,0,0.25\n1,0,0.75\n2,1,0.5\n")
    run = read_run(folder)
    assert (run.test.mean, run.test.model, run.test.clients) == (0.5, "trained", {0: 0.25, 1: 0.75})
    assert math.isnan(read_run(folder, "validation_selected").test.mean)  # another round
    assert math.isnan(read_run(folder, "best_test").test.mean)

    assert read_run(write_run(folder, clients=[0.125, 0.375])).test.mean == 0.25  # rounds come first


def test_personalized_clients_are_read(tmp_path):
    folder = write_personalized(write_run(tmp_path / "run"), [0.5, 0.75], [1.0])
    run = read_run(folder)
    assert (run.personalized.mean, run.personalized_novel.mean) == (0.625, 1.0)
    assert (run.personalized.clients, run.personalized_novel.clients) == ({0: 0.5, 1: 0.75}, {2: 1.0})
    assert (run.personalized.score, run.personalized.model) == ("classifier", "fine_tuned")


def test_a_run_that_was_only_personalized_has_no_test_accuracy(tmp_path):
    folder = write_personalized(tmp_path / "scratch" / "version_0", [0.5, 0.75])
    assert find_runs(tmp_path / "scratch") == [folder]
    run = read_run(folder)
    assert run.personalized.mean == 0.625
    assert math.isnan(run.test.mean)
    assert run.history == ()


def test_runs_are_found_by_version_and_below_a_study(tmp_path):
    for number in (10, 9):
        write_run(tmp_path / "one" / f"version_{number}")
    assert [folder.name for folder in find_runs(tmp_path / "one")] == ["version_9", "version_10"]
    study = tmp_path / "study" / "runs"
    paths = [write_run(study / "few" / row / "seed_0" / "version_0") for row in ("FedAvg", "FedPAC")]
    write_run(tmp_path / "study" / "search" / "trial_0" / "version_0")  # chosen by its validation: no result
    assert find_runs(tmp_path / "study") == paths
    assert find_runs(paths[0]) == paths[:1]


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: (p / "version_0").mkdir(parents=True)])
def test_a_folder_without_results_is_named(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"no results\.json in .*run or .*version_\*.*`pfl fit` writes it"):
        find_runs(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"method": "FedAvg"}', '{"format": "a"}'])
def test_foreign_results_are_named(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"results\.json is not a valid file of a run"):
        read_run(tmp_path)


def test_a_newer_form_is_refused(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"format": 3}))
    with pytest.raises(
        ConfigurationError,
        match=r"has format 3, this version of pfl_lightning reads format 2: .* a later version later ones",
    ):
        read_run(tmp_path)


def test_a_run_that_is_not_finished_is_named(tmp_path):
    with pytest.warns(UserWarning, match="run is not finished: it has 1 rounds"):
        assert not read_run(write_run(tmp_path / "run", finished=False)).finished


def test_what_lies_beside_the_runs_of_a_study_is_no_run(tmp_path):
    seed = tmp_path / "studies" / "one" / "runs" / "all" / "FedAvg" / "seed_0"
    kept = write_run(seed / "version_0")
    write_run(seed / "set_aside_0")
    for name in ("search/all/FedAvg/trials_1/0", "probe/all/FedAvg", "replaced/2026/runs/all/FedAvg/seed_0"):
        write_run(tmp_path / "studies" / "one" / name / "version_0")
    assert find_runs(tmp_path / "studies") == find_runs(tmp_path / "studies" / "one") == [kept]
    own = write_run(tmp_path / "my" / "search" / "version_0")  # a name like any other outside of a study
    assert find_runs(tmp_path / "my") == [own]


def test_accuracies_of_clients_that_are_no_numbers_are_left_out(tmp_path):
    run = read_run(write_run(tmp_path / "run", clients=(0.25, math.nan, 0.75)))
    assert run.test.clients == {0: 0.25, 2: 0.75}


def test_a_damaged_config_is_named(tmp_path):
    folder = write_run(tmp_path / "run", config={"seed_everything": 0})
    (folder / "config.yaml").write_text(": : {")
    with pytest.raises(ConfigurationError, match=r"(?s)config\.yaml is not a valid file of a run .* repair the file"):
        read_run(folder)
    (folder / "config.yaml").unlink()
    assert read_run(folder).test.mean == 0.5


def test_trials_of_a_search_that_was_interrupted_are_no_runs(tmp_path):
    run = write_run(tmp_path / "study" / "other" / "version_0")
    search = tmp_path / "study" / "search" / "all" / "FedAvg"
    write_run(search / "trials_0123abcd" / "0" / "version_0")
    (search / "journal.log").write_text("")
    assert find_runs(tmp_path / "study") == [run]


def test_a_run_that_went_on_after_another_ones_training_is_a_run_of_its_own_config(tmp_path):
    """Its clients were personalized once; in the other's folder they were personalized twice."""
    folder = write_run(tmp_path / "run")
    change = {"option": "personalize.train", "before": "head", "now": "all", "known": True}
    found = {}
    for config in ("config.yaml", "config-resumed-1.yaml"):
        (folder / "changes.json").write_text(json.dumps([{"config": config, "from_round": 3, "changes": [change]}]))
        found[config] = [option for option in read_run(folder).options if option.startswith("resumed.")]
    assert found == {"config.yaml": [], "config-resumed-1.yaml": ["resumed.personalize.train"]}
