"""What a search found for the rows of a study."""

from _helpers.studies import write_study

from pfl_lightning.study import plan_cells, read_study
from pfl_lightning.study.definition.options import option_of
from pfl_lightning.study.searches import NoTrialError, searched_cells


def test_what_a_search_found_is_laid_over_its_rows(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": {"low": 0.01, "high": 0.1}}, "methods": ["FedPer"]}
    study = read_study(write_study(tmp_path, search=search, seeds=[4, 5]))
    cells, calls = plan_cells(study), []

    def find(asked, config, folder):
        calls.append((asked.trials, config["seed_everything"], folder))
        return {"model.method.lr": 0.07}

    ready, waiting = searched_cells(study, cells, tmp_path / "out")
    assert ([cell.label for cell in ready], [cell.label for cell in waiting]) == (["FedAvg"], ["FedPer"])
    for _ in range(2):  # the second time it is read
        ready, waiting = searched_cells(study, cells, tmp_path / "out", find)
    assert calls == [(3, 4, tmp_path / "out" / "search" / "all" / "FedPer")]
    assert waiting == []
    assert [option_of(cell.config, "model.method.lr") for cell in ready] == [0.05, 0.07]

    more = read_study(write_study(tmp_path, search={**search, "trials": 5}, seeds=[4, 5]))
    assert [cell.label for cell in searched_cells(more, plan_cells(more), tmp_path / "out")[1]] == ["FedPer"]


def test_where_data_lie_is_no_other_search_but_another_choice_is(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": {"low": 0.01, "high": 0.1}}}
    calls = []

    def find(asked, config, folder):
        calls.append(asked)
        return {"model.method.lr": 0.07}

    study = read_study(write_study(tmp_path, search=search))
    for words in ((), (("data.init_args.root", "elsewhere"),)):
        searched_cells(study, plan_cells(study, words), tmp_path / "out", find)
        assert len(calls) == 2
    study = read_study(write_study(tmp_path, search=search, choice="validation_selected"))
    assert len(searched_cells(study, plan_cells(study), tmp_path / "out")[1]) == 2
    searched_cells(study, plan_cells(study), tmp_path / "out", find)
    study = read_study(write_study(tmp_path, search=search, choice="best_test"))  # validation chooses for both
    assert searched_cells(study, plan_cells(study), tmp_path / "out")[1] == []


def test_rows_and_seeds_that_are_added_are_no_other_search(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": {"low": 0.01, "high": 0.1}}}

    def waiting(methods, seeds, find=None):
        study = read_study(write_study(tmp_path, search={**search, "methods": methods}, seeds=seeds))
        return [cell.label for cell in searched_cells(study, plan_cells(study), tmp_path / "out", find)[1]]

    assert waiting(["FedAvg"], [1, 2], lambda asked, config, folder: {"model.method.lr": 0.07}) == []
    assert waiting(["FedAvg", "FedPer"], [1, 2]) == ["FedPer"]
    assert waiting(["FedAvg"], [0, 1, 2]) == []
    assert waiting(["FedAvg"], [0, 2]) == ["FedAvg"]  # it was that of seed 1
    (tmp_path / "out" / "search" / "all" / "FedAvg" / "best.yaml").write_text("")
    assert waiting(["FedAvg"], [1, 2]) == ["FedAvg"]


def test_a_number_in_quotes_is_searched_once(tmp_path):
    search = {"trials": 1, "space": {"model.method.lr": {"choices": ["1e-3", "1e-2"]}}, "methods": ["FedPer"]}
    study, calls = read_study(write_study(tmp_path, search=search)), []

    def find(asked, config, folder):
        calls.append(asked)
        return {"model.method.lr": "1e-3"}

    for _ in range(2):
        ready, waiting = searched_cells(study, plan_cells(study), tmp_path / "out", find)
    assert (len(calls), len(ready), waiting) == (1, 2, [])
    assert len(list((tmp_path / "out" / "search").rglob("best*.yaml"))) == 1


def test_a_search_without_a_trial_that_succeeded_leaves_its_row_alone(tmp_path):
    study = read_study(
        write_study(tmp_path, search={"trials": 1, "space": {"model.method.lr": {"choices": [0.1, 0.2]}}})
    )

    def find(asked, config, folder):
        if folder.name == "FedAvg":
            raise NoTrialError("no trial of the search succeeded")
        return {"model.method.lr": 0.2}

    ready, waiting = searched_cells(study, plan_cells(study), tmp_path / "out", find)
    assert ([cell.label for cell in ready], [cell.label for cell in waiting]) == (["FedPer"], ["FedAvg"])
