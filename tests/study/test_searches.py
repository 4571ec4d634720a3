"""What a search found for the rows of a study."""

from _helpers.studies import write_study

from pfl_lightning.runs.config import option_of
from pfl_lightning.study.plan import plan_cells
from pfl_lightning.study.reader import read_study
from pfl_lightning.study.searches import search_row, with_answers


def rows(tmp_path, words=(), **keys):
    """The study and its rows with what was found for them."""
    study = read_study(write_study(tmp_path, **keys))
    return study, with_answers(study, plan_cells(study, words), tmp_path / "out")


def search_all(tmp_path, find, words=(), **keys):
    """Search all rows that wait."""
    study, cells = rows(tmp_path, words, **keys)
    for cell in cells:
        if cell.waits:
            search_row(study, cell, tmp_path / "out", find)


def waiting(tmp_path, words=(), **keys):
    return [cell.label for cell in rows(tmp_path, words, **keys)[1] if cell.waits]


LR = {"low": 0.01, "high": 0.1}


def found(asked, config, folder):
    return {"model.method.lr": 0.07}


def test_what_a_search_found_is_laid_over_its_rows(tmp_path):
    search, calls = {"trials": 3, "space": {"model.method.lr": LR}, "methods": ["FedPer"]}, []

    def find(asked, config, folder):
        calls.append((asked.trials, config["seed_everything"], folder))
        return {"model.method.lr": 0.07}

    assert waiting(tmp_path, search=search, seeds=[4, 5]) == ["FedPer"]
    for _ in range(2):  # the second time it is read
        search_all(tmp_path, find, search=search, seeds=[4, 5])
    assert calls == [(3, 4, tmp_path / "out" / "search" / "all" / "FedPer")]
    _, cells = rows(tmp_path, search=search, seeds=[4, 5])
    assert [option_of(cell.config, "model.method.lr") for cell in cells] == [0.05, 0.07]
    assert waiting(tmp_path, search={**search, "trials": 5}, seeds=[4, 5]) == ["FedPer"]


def test_a_row_that_another_command_has_searched_meanwhile_is_not_searched_again(tmp_path):
    search, calls = {"trials": 3, "space": {"model.method.lr": LR}, "methods": ["FedPer"]}, []
    study, cells = rows(tmp_path, search=search)
    for _ in range(2):
        assert search_row(study, cells[1], tmp_path / "out", lambda *asked: calls.append(1) or found(*asked)) == {
            "model.method.lr": 0.07
        }
    assert calls == [1]


def test_where_data_lie_is_no_other_search_but_another_choice_is(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": LR}}
    search_all(tmp_path, found, search=search)
    assert waiting(tmp_path, [("data.init_args.root", "elsewhere")], search=search) == []
    assert len(waiting(tmp_path, search=search, choice="validation_selected")) == 2
    search_all(tmp_path, found, search=search, choice="validation_selected")
    assert waiting(tmp_path, search=search, choice="best_test") == []  # validation chooses for both
    assert waiting(tmp_path, search=search) == []  # the first one is still known


def test_rows_and_seeds_that_are_added_are_no_other_search(tmp_path):
    search = {"trials": 3, "space": {"model.method.lr": LR}}

    def of(methods, seeds):
        return {"search": {**search, "methods": methods}, "seeds": seeds}

    search_all(tmp_path, found, **of(["FedAvg"], [1, 2]))
    assert waiting(tmp_path, **of(["FedAvg", "FedPer"], [1, 2])) == ["FedPer"]
    assert waiting(tmp_path, **of(["FedAvg"], [0, 1, 2])) == []
    assert waiting(tmp_path, **of(["FedAvg"], [0, 2])) == ["FedAvg"]  # it was that of seed 1
    [kept] = (tmp_path / "out" / "search" / "all" / "FedAvg").glob("best-*.yaml")
    kept.write_text("")
    assert waiting(tmp_path, **of(["FedAvg"], [1, 2])) == ["FedAvg"]


def test_a_number_in_quotes_is_searched_once(tmp_path):
    search = {"trials": 1, "space": {"model.method.lr": {"choices": ["1e-3", "1e-2"]}}, "methods": ["FedPer"]}
    search_all(tmp_path, lambda asked, config, folder: {"model.method.lr": "1e-3"}, search=search)
    assert waiting(tmp_path, search=search) == []
    assert len(list((tmp_path / "out" / "search").rglob("best*.yaml"))) == 1
