"""The studies that ship: each is read at every scale, and its configs are those of `pfl fit`."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import pfl_lightning
from pfl_lightning.cli import main
from pfl_lightning.runs.config import option_of
from pfl_lightning.study.check import config_errors
from pfl_lightning.study.options import with_option
from pfl_lightning.study.plan import Cell, plan_cells, plan_runs
from pfl_lightning.study.reader import read_study

FOLDER = Path(pfl_lightning.__file__).parent / "studies"
STUDIES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
SCALES = {"smoke", "reduced", "paper"}
PAPERS = {
    "calibre": "Calibre",
    "dcpfl": "DCPFL",
    "dualfed": "DualFed",
    "fedclassavg": "FedClassAvg",
    "fedpac": "FedPAC",
}
OF_NO_PAPER = {"digits", "digits-fedamp", "digits-fedas", "digits-methods", "further-methods", "leaderboard"}
OF_NO_PAPER |= {"robust", "robust-cifar10"}
"""Methods of the papers whose tables ship, by the first word of the studies' names."""


@cache
def study_of(name, scale=""):
    return read_study(STUDIES[name], scale)


@cache
def cells_of(name, scale=""):
    return plan_cells(study_of(name, scale))


def test_every_paper_has_studies():
    assert {name.partition("-")[0] for name in {*STUDIES} - OF_NO_PAPER} == {*PAPERS}
    assert {"digits", "fedpac-table1", "fedpac-table2", "dcpfl-table1", "dcpfl-table2", "fedclassavg-table2"} <= {
        *STUDIES
    }


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_read_at_every_scale(name):
    study = study_of(name)
    assert {*study.scales} >= SCALES
    assert study.title
    for scale in ("", *study.scales):
        assert cells_of(name, scale)
    if study.published.figures:
        assert any(part in study.published.source for part in ("Table", "Figure"))


@pytest.mark.parametrize("name", STUDIES)
def test_no_study_chooses_the_engine(name):
    for scale in ("", *study_of(name).scales):
        assert all(option_of(cell.config, "model.engine") is None for cell in cells_of(name, scale))


@pytest.mark.parametrize("name", STUDIES)
def test_a_smoke_study_runs_anywhere(name):
    """On the digits, a few seconds each: little data, a small network, two rounds."""
    cells = cells_of(name, "smoke")
    assert len(cells) <= 7
    assert len(study_of(name, "smoke").seeds) == 1
    for cell in cells:
        assert str(option_of(cell.config, "data.class_path")).endswith("Digits"), cell.name
        assert option_of(cell.config, "trainer.max_epochs") <= 2
        encoders = option_of(cell.config, "model.encoder")
        assert {*([encoders] if isinstance(encoders, str) else encoders)} <= {"mlp", "small_cnn"}, cell.name


@pytest.mark.parametrize("name", sorted({*STUDIES} - OF_NO_PAPER))
def test_every_scale_has_the_method_of_its_paper(name):
    method = PAPERS[name.partition("-")[0]]
    for scale in study_of(name).scales:
        named = {str(option_of(cell.config, "model.method.class_path")) for cell in cells_of(name, scale)}
        assert method in {path.rpartition(".")[2] for path in named}, scale


def test_seeds_draw_the_partition_too():
    """Wherever a partition has a seed, the study's seed reaches it."""
    for name in STUDIES:
        study = study_of(name)
        first, *_ = plan_runs(study, cells_of(name), Path("runs"))
        partition = "data.init_args.partition.init_args"
        for place in (f"{partition}.seed", f"{partition}.base.init_args.seed"):
            if option_of(first.config, place) is not None and study.seed_options:
                assert place in study.seed_options, name
        assert (
            option_of(first.config, f"{partition}.seed", option_of(first.config, f"{partition}.base.seed")) is not None
        )


# ---------------------------------------------------------------------- the options of pfl fit


def every_config():
    """One cell for each different part of a config, so that each is parsed once: all would take minutes."""
    seen: Counter[str] = Counter()
    chosen = []
    for name in STUDIES:
        for scale in study_of(name).scales:
            for cell in cells_of(name, scale):
                parts = [json.dumps(cell.config.get(key), sort_keys=True) for key in ("data", "loop", "personalize")]
                parts.append(json.dumps(_without_numbers(cell.config["model"]), sort_keys=True))
                if any(not seen[part] for part in parts):
                    chosen.append(Cell(f"{name} {scale}", cell.method, cell.label, cell.config))
                seen.update(parts)
    return chosen


def _without_numbers(value):
    """A learning rate is parsed like any other."""
    if isinstance(value, dict):
        return {key: _without_numbers(entry) for key, entry in value.items()}
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else value


def wrong(cells):
    """What ``pfl fit`` would refuse, by cell."""
    errors = config_errors([cell.config for cell in cells])
    return {cell.name: error for cell, error in zip(cells, errors, strict=True) if error is not None}


@pytest.mark.parametrize("name", ["digits", pytest.param("dcpfl-table2", marks=pytest.mark.slow)])
def test_options_are_those_of_pfl_fit(name):
    assert wrong(cells_of(name, "paper")) == {}


def test_an_option_that_pfl_fit_does_not_know_is_found():
    first, *others = cells_of("digits", "paper")
    broken = replace(first, config=with_option(first.config, "model.method.init_args.lrr", 0.1))
    (error,) = wrong([broken, *others]).values()
    assert "lrr" in error


@pytest.mark.slow
def test_the_options_of_all_studies_are_those_of_pfl_fit():
    assert wrong(every_config()) == {}


@pytest.mark.slow
def test_the_newcomers_study_runs_to_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")
    words = [
        "study",
        str(STUDIES["digits"]),
        "--scale",
        "smoke",
        "--output",
        str(tmp_path),
        "--trainer.max_epochs",
        "1",
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    table = (tmp_path / "table.md").read_text()
    assert "FedAvg" in table
    assert "FedPAC" in table


SMALL = sorted({*STUDIES} - {"digits"})


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_study_runs_to_its_table_at_the_smoke_scale(tmp_path, name):
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", name, "--scale", "smoke", "--output", str(tmp_path)])
    assert ended.value.code == 0
    assert (tmp_path / "table.md").is_file()
