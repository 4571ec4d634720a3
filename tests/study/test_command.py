"""``pfl study FILE`` and ``pfl reproduce NAME``: what they run, say and refuse. Two tests play real rounds."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from _helpers import plain_report, studies
from _helpers.studies import METHODS, TINY, PretendedStarter, StarterHere, write_study

import pfl_lightning
from pfl_lightning.cli import main
from pfl_lightning.jobs import supervision
from pfl_lightning.jobs.warm import WarmStarter
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study import command, conduct, runner
from pfl_lightning.study.searches import NoTrialError


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """No waiting, a plain report, and the working directory."""
    monkeypatch.setattr(supervision, "POLL", 0.01)
    monkeypatch.setitem(sys.modules, "pfl_lightning.report", sys.modules.get("pfl_lightning.report"))
    before = vars(pfl_lightning).get("report")
    plain_report.install()
    monkeypatch.chdir(tmp_path)
    yield
    vars(pfl_lightning).pop("report")
    if before is not None:
        pfl_lightning.report = before


@pytest.fixture
def play(monkeypatch, capsys):
    """Calls ``pfl study`` with runs that are pretended; returns the exit code and the commands of the runs.

    Instead of 2 it returns what was said of the mistake.
    """

    def call(path, *words, checked=True, **starter):
        pretended = PretendedStarter(**starter)
        monkeypatch.setattr(conduct, "local_starter", lambda threads: pretended)
        if checked:
            monkeypatch.setattr("pfl_lightning.study.check.check_configs", lambda *given: None)
        with pytest.raises(SystemExit) as end:
            main(["study", str(path), *words])
        code = end.value.code
        return capsys.readouterr().err if code == 2 else code, pretended.commands

    monkeypatch.setattr(plain_report, "figures", lambda run, choice: str(run))
    return call


def test_values_that_a_run_would_refuse_are_refused_before_it(tmp_path, play):
    wrong = {
        "rounds": {"trainer": {"max_epochs": -2}},
        "endless": {"trainer": {"max_epochs": None}},
        "cohort": {"loop": {"cohort": 1.5}},
        "batch": {"data": {"init_args": {"batch_size": 0}}},
        "clients": {"data": {"init_args": {"partition": {"init_args": {"num_clients": 0}}}}},
        "resumed": {"ckpt_path": "last"},
        "rate": {"model": {"method": {"init_args": {"lr": -0.1}}}},
        "width": {"model": {"method": {"class_path": "SphereFed"}}},  # of the encoder that only a run has: taken
    }
    methods = {name: [METHODS["FedAvg"], config] for name, config in wrong.items()}
    code, commands = play(write_study(tmp_path, methods=methods), checked=False)
    assert commands == []
    assert "rounds: trainer.max_epochs: a study's runs need a number of rounds of at least 0, got -2" in code
    assert "endless: trainer.max_epochs: a study's runs need a number of rounds of at least 0, got None" in code
    assert "cohort: cohort must be a share in (0, 1] or a number of clients" in code
    assert "batch: batch_size must be at least 1, got 0" in code
    assert "clients: num_clients must be at least 1, got 0" in code
    assert "resumed: ckpt_path: the runs of a study resume by themselves; leave it out" in code
    assert "rate: model.method.init_args.lr must be a finite number of at least 0, got -0.1" in code
    assert "width" not in code


def test_the_table_of_a_study_and_of_more_seeds(tmp_path, monkeypatch, capsys):
    """The runs are real ones, in this process."""
    monkeypatch.setattr("pfl_lightning.study.check.check_configs", lambda *given: None)
    table = tmp_path / "runs" / "studies" / "tiny" / "table.md"
    for seeds in ([0], [0, 1]):
        starter = StarterHere()
        monkeypatch.setattr(conduct, "local_starter", lambda threads, starter=starter: starter)
        path = write_study(tmp_path, seeds=seeds, methods={"FedPer": METHODS["FedPer"]})
        with pytest.raises(SystemExit) as end:
            main(["study", str(path), "--trainer.max_epochs", "1"])
        assert end.value.code == 0
        assert len(starter.commands) == 1  # the second time the other seed alone
        assert all(len(row[3]) == len(seeds) for row in json.loads(table.read_text())[2])
    said = capsys.readouterr().out
    assert "A tiny study: 2 runs in runs/studies/tiny (1 done, 1 new)" in said
    assert "FedPer, seed 1 done, test accuracy " in said
    folder = tmp_path / "runs" / "studies" / "tiny" / "runs" / "all" / "FedPer" / "seed_0"
    assert json.loads((folder / "progress.json").read_text())["round"] == 1
    assert yaml.safe_load((folder / "run.yaml").read_text())["trainer"]["max_epochs"] == 1


@pytest.mark.parametrize("starter", [None, pytest.param(WarmStarter(1), marks=pytest.mark.slow)])
def test_every_config_is_checked_before_anything_runs(tmp_path, play, monkeypatch, starter):
    """In a process, which imports everything once more, or in this one."""
    if starter is not None:
        monkeypatch.setattr(studies, "checked_here", starter)
    grid = {"model.method.init_args.lr": [0.1], "model.method.init_args.epocs": [1]}
    methods = {**METHODS, "FedPAK": {"model": {"method": {"class_path": "FedPAK"}}}}
    code, commands = play(write_study(tmp_path, grid=grid, methods=methods), checked=False)
    assert commands == []
    assert "the study's configs do not fit pfl fit:" in code
    assert "FedAvg, lr=0.1, epocs=1" in code
    assert "Option 'epocs' is not accepted" in code
    assert "FedPAK, lr=0.1, epocs=1" in code


def test_the_plan(tmp_path, monkeypatch, capsys):
    checked = []
    monkeypatch.setattr("pfl_lightning.study.check.check_configs", lambda runs, starter: checked.extend(runs))
    path = write_study(tmp_path, seeds=[0, 1])
    main(["study", str(path), "--check"])
    said = capsys.readouterr().out
    assert said.startswith("checking the configs of 4 runs\n")  # before anything that takes time
    assert "A tiny study: 4 runs in runs/studies/tiny (4 new)" in said
    assert "new        FedPer, seed 1" in said
    assert not (tmp_path / "runs").exists()
    assert len(checked) == 4


def test_runs_of_a_row_that_was_taken_out_are_named(tmp_path, play, monkeypatch, capsys):
    play(write_study(tmp_path))
    code, commands = play(write_study(tmp_path, methods={"FedAvg": METHODS["FedAvg"]}))
    assert (code, commands) == (0, [])
    monkeypatch.setattr("pfl_lightning.study.check.check_configs", lambda *given: None)
    capsys.readouterr()
    main(["study", str(write_study(tmp_path, methods={"FedAvg": METHODS["FedAvg"]})), "--check"])
    said = capsys.readouterr().out
    assert "runs/studies/tiny/runs/all/FedPer: 1 run of a row that the study does not have\n" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figure": "personalized"}, "figure is personalized, and no config has the section personalize: add one"),
        (
            {"choice": "validation_selected", "settings": {"all": {"data": {"init_args": {"validation_share": 0}}}}},
            "choice is validation_selected, and data.init_args.validation_share is 0: give the clients",
        ),
        ({"metric": "f1"}, "metric is f1, which FedAvg does not measure: add {metrics: [f1]} to base"),
        (
            {"settings": {"all": {"trainer": {"check_val_every_n_epoch": 10}}}},
            "check_val_every_n_epoch is more than the rounds, max_epochs, so that none is evaluated: add --trainer",
        ),
    ],
    ids=["figure", "choice", "metric", "evaluation"],
)
def test_a_table_that_would_be_empty_is_refused_before_its_runs(tmp_path, play, change, message):
    said, commands = play(write_study(tmp_path, **change))
    assert message in said
    assert commands == []


def test_the_table_of_another_metric(tmp_path, play, monkeypatch):
    seen = []
    write = sys.modules["pfl_lightning.report"].write_report

    def write_report(rows, folder, settings):
        seen.append(settings.metric)
        return write(rows, folder, settings)

    monkeypatch.setattr(sys.modules["pfl_lightning.report"], "write_report", write_report)
    code, commands = play(write_study(tmp_path, metric="f1", base={**TINY, "metrics": ["f1", "auroc"]}))
    assert (code, len(commands)) == (0, 2)
    assert set(seen) == {"f1"}


def test_results_that_cannot_be_read_are_written_again(tmp_path, play, capsys):
    """A damaged file ends neither the table nor the other runs."""
    path = write_study(tmp_path)
    play(path)
    capsys.readouterr()
    (damaged,) = tmp_path.glob("runs/studies/tiny/runs/all/FedPer/seed_0/version_0/results.json")
    damaged.write_bytes(damaged.read_bytes()[:9])
    main(["study", str(path), "--report-only"])
    said = capsys.readouterr().out
    assert "FedAvg: 1 runs" in said
    assert "FedPer, seed 0 (not finished)." in said
    code, commands = play(path)
    assert (code, len(commands)) == (0, 1)
    assert json.loads(damaged.read_bytes())["finished"]


def test_a_failed_run_is_missing_in_the_table(tmp_path, play, capsys):
    path = write_study(tmp_path, seeds=[0, 1])
    code, _ = play(path, codes={"FedPer": [1, 1]})
    assert code == 1
    said = capsys.readouterr().out
    assert "FedPer, seed 0 failed with exit code 1: pfl: exit 1 was asked for" in said
    assert "FedPer, seed 1 failed with exit code 1: pfl: exit 1 was asked for" in said
    assert "2 runs failed, not in the table: FedPer, seed 0; FedPer, seed 1" in said
    table = json.loads((tmp_path / "runs" / "studies" / "tiny" / "table.md").read_text())
    assert table[1] == "Missing: FedPer, seeds 0, 1 (failed with exit code 1)."
    code, commands = play(path)  # the same command tries them again
    assert (code, len(commands)) == (0, 2)


def test_changed_options_are_refused_or_restarted(tmp_path, play, capsys):
    path = write_study(tmp_path)
    play(path)
    code, commands = play(path, "--trainer.max_epochs", "5")
    assert "runs/studies/tiny has 2 runs made with different options:\nFedAvg, seed 0; FedPer, seed 0: " in code
    assert "trainer.max_epochs: 2 -> 5" in code
    assert commands == []
    code, commands = play(path, "--trainer.max_epochs", "5", "--output", "other")
    assert (code, len(commands)) == (0, 2)
    code, commands = play(path, "--trainer.max_epochs", "5", "--restart")
    assert (code, len(commands)) == (0, 2)
    kept = list((tmp_path / "runs" / "studies" / "tiny" / "replaced").rglob("results.json"))
    assert len(kept) == 2
    code, commands = play(write_study(tmp_path, methods={"FedAvg": METHODS["FedAvg"]}), "--trainer.max_epochs", "5")
    assert (code, len(commands)) == (0, 0)


def test_a_stopped_study_says_how_to_go_on(tmp_path, play, monkeypatch, capsys):
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    monkeypatch.setattr(conduct.Display, "tick", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    try:
        code, _ = play(write_study(tmp_path), "--processes", "1", endless=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 128 + signal.SIGTERM
    said = capsys.readouterr().out
    assert f"pfl: stopped by SIGTERM. Resume with:\npfl study {tmp_path}/tiny.yaml --processes 1\n" in said


def test_a_study_that_is_stopped_before_its_runs(tmp_path, play, monkeypatch, capsys):
    monkeypatch.setattr(conduct.Conductor, "_check_configs", lambda self, runs: os.kill(os.getpid(), signal.SIGTERM))
    code, commands = play(write_study(tmp_path))
    assert (code, commands) == (128 + signal.SIGTERM, [])
    assert "stopped by SIGTERM. Resume with:" in capsys.readouterr().out


def test_the_report_alone(tmp_path, play, capsys):
    path = write_study(tmp_path)
    main(["study", str(path), "--report-only"])
    assert "no run is finished: there is no table yet" in capsys.readouterr().out
    play(path)
    capsys.readouterr()
    main(["study", str(path), "--report-only", "--trainer.precision", "bf16-mixed"])
    said = capsys.readouterr().out
    assert "no run is finished: there is no table yet" in said
    assert 'Missing: FedAvg, seed 0 (made with other options: trainer.precision: "not given" -> "bf16-' in said
    (tmp_path / "runs" / "studies" / "tiny" / "table.md").unlink()
    main(["study", str(path), "--report-only"])
    assert (tmp_path / "runs" / "studies" / "tiny" / "table.md").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.yaml"], "missing.yaml cannot be read as YAML: No such file or directory"),
        (["tiny.yaml", "--scal", "smoke"], "unknown option --scal: did you mean --scale?"),
        (["tiny.yaml", "--trainr.max_epochs", "2"], "--trainr.max_epochs: did you mean --trainer.max_epochs?"),
        (["tiny.yaml", "--rounds", "3"], "unknown option --rounds: did you mean --trainer.max_epochs?"),
        (["tiny.yaml", "--lr=0.1"], "unknown option --lr: did you mean --model.method.lr?"),
        (["tiny.yaml", "--seed", "1"], "unknown option --seed: did you mean --seeds?"),
        (["tiny.yaml", "--bogus", "3"], "in pfl study --help, those of its runs in pfl fit --help"),
        (["tiny.yaml", "--run_dir", "x"], "its folder by --output; its runs resume by themselves"),
        (["tiny.yaml", "--trainer.max_epochs"], "--trainer.max_epochs has no value"),
        (["--processes", "1"], "pfl study needs a study file"),
        (["tiny.yaml", "--scale", "smoke"], "tiny.yaml has no scale 'smoke'"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, capsys, words, message):
    write_study(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["study", *words])
    assert message in capsys.readouterr().err


def test_help(capsys):
    main(["study"])
    assert "usage: pfl study FILE [options]" in capsys.readouterr().out


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    path = write_study(tmp_path, scales={"reduced": {"seeds": [5]}, "paper": {}})
    monkeypatch.setattr(command, "shipped_studies", lambda: {"tiny": path})


def test_reproduce_lists_what_ships(shipped, capsys):
    main(["reproduce"])
    said = capsys.readouterr().out
    assert "A tiny study" in said
    assert "reduced, paper" in said


def test_reproduce_takes_the_reduced_scale_and_a_folder_of_data(shipped, monkeypatch, capsys):
    monkeypatch.setattr("pfl_lightning.study.check.check_configs", lambda *given: None)
    monkeypatch.setattr(plain_report, "figures", lambda run, choice: str(run))
    pretended = PretendedStarter()
    monkeypatch.setattr(conduct, "local_starter", lambda threads: pretended)
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "tiny", "--data", "images"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "2 of 2 done" in said
    assert len(pretended.commands) == 2
    run = yaml.safe_load(Path("runs/studies/tiny-reduced/runs/all/FedPer/seed_5/run.yaml").read_text())
    assert run["data"]["init_args"]["root"] == "images"


@pytest.mark.slow
def test_the_smoke_scale_has_the_digits_and_takes_no_other_data(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(f"reproduce fedpac-table1 --scale smoke --data images --check --output {tmp_path}".split())
    assert "Option 'root' is not accepted" in capsys.readouterr().err


def test_reproduce_of_an_unknown_name(shipped, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["reproduce", "tny"])
    assert "no study 'tny' ships; did you mean 'tiny'?" in capsys.readouterr().err


SEARCH = {"trials": 3, "space": {"model.method.init_args.lr": {"low": 0.01, "high": 0.1}}, "methods": ["FedPer"]}


def test_rows_that_wait_for_a_search_are_missing_in_the_table(tmp_path, play, capsys):
    play(write_study(tmp_path, methods={"FedAvg": METHODS["FedAvg"]}))
    main(["study", str(write_study(tmp_path, search=SEARCH)), "--report-only"])
    table = json.loads((tmp_path / "runs" / "studies" / "tiny" / "table.md").read_text())
    assert table[1] == "Missing: FedPer, seed 0 (not searched yet)."


def test_a_search_without_validation_parts_is_refused_by_the_check(tmp_path, play):
    code, _ = play(write_study(tmp_path, search=SEARCH), "--check", "--data.init_args.validation_share", "0")
    assert "a search compares validation accuracies" in code


@pytest.mark.slow
def test_options_that_are_searched_are_checked_before_the_search(tmp_path, play, capsys):
    search = {**SEARCH, "space": {"model.method.init_args.lrr": {"low": 0.01, "high": 0.1}}}
    code, commands = play(write_study(tmp_path, search=search), checked=False)
    assert commands == []
    assert "Option 'lrr' is not accepted" in code


def _rows_of_the_table(folder):
    table = json.loads((folder / "runs" / "studies" / "tiny" / "table.md").read_text())[2]
    return [(row[1], len(row[3])) for row in table]


def test_only_a_part_of_a_study(tmp_path, play, capsys):
    """Runs of other seeds are missing in the table until a command asks for them; rows without runs have none."""
    methods = {**METHODS, "FedPer, w/o": METHODS["FedPer"]}
    path = write_study(tmp_path, seeds=[0, 1], methods=methods, search={**SEARCH, "methods": ["FedPer, w/o"]})
    code, commands = play(path, "--seeds", "1", "--methods", "FedPer,FedAvg")
    assert (code, len(commands)) == (0, 2)
    said = capsys.readouterr().out
    assert "A tiny study: 2 runs in runs/studies/tiny (2 new); 4 more left out now" in said
    assert "Missing: FedAvg, seed 0; FedPer, seed 0.\n" in said
    assert "1 row of the study left out, none of which was run" in said
    assert _rows_of_the_table(tmp_path) == [("FedAvg", 1), ("FedPer", 1)]
    code, commands = play(path, "--methods", "FedAvg")
    assert (code, len(commands)) == (0, 1)
    assert _rows_of_the_table(tmp_path) == [("FedAvg", 2), ("FedPer", 1)]
    capsys.readouterr()
    main(["study", str(path), "--report-only"])
    assert "Missing: FedPer, seed 0; FedPer, w/o, seeds 0, 1 (not searched yet)." in capsys.readouterr().out
    assert _rows_of_the_table(tmp_path) == [("FedAvg", 2), ("FedPer", 1), ("FedPer, w/o", 0)]
    main(["study", str(path), "--methods", "FedPer, w/o", "--check"])
    said = capsys.readouterr().out
    assert "to search  FedPer, w/o" in said
    assert "FedAvg" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0,3"], "--seeds: the study has no '3' (it has 0; 1)"),
        (["--methods", "FedAvgg"], "--methods: the study has no 'FedAvgg'; did you mean 'FedAvg'? (it"),
        (["--methods", ","], "--methods: the study has no '' (it has"),
        (["--settings", "few"], "--settings: the study has no 'few' (it has none)"),
    ],
)
def test_a_part_that_the_study_has_not(tmp_path, play, words, message):
    code, commands = play(write_study(tmp_path, seeds=[0, 1]), *words)
    assert message in code
    assert commands == []


def test_a_row_of_the_grid_and_a_setting_are_parts(tmp_path, play):
    grid = {"model.method.init_args.lr": [0.1, 0.2]}
    path = write_study(tmp_path, grid=grid, settings={"few": {}, "many, all": {}})
    code, commands = play(path, "--methods", "FedAvg, lr=0.2, FedPer", "--settings", "many,all")
    assert (code, len(commands)) == (0, 3)
    assert all("/many-all/" in str(command) for command in commands)


def test_methods_may_have_searches_of_their_own(tmp_path, play, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "pfl_lightning.study.tuner.search_options", lambda search, *args, **options: asked.append(search) or {}
    )
    lr, epochs, momentum = (f"model.method.init_args.{name}" for name in ("lr", "epochs", "momentum"))
    own = {"FedAvg": {momentum: {"choices": [0.0, 0.9]}}, "FedPer": None}
    search = {"trials": 3, "space": {lr: {"low": 0.01, "high": 0.1}}, "methods": own}
    code, _ = play(write_study(tmp_path, search=search))
    assert code == 0
    assert [list(one.space) for one in asked] == [[lr, momentum], [lr]]
    code, _ = play(write_study(tmp_path, search={**search, "methods": {**own, "FedPAC": None}}, seeds=[0, 1]))
    assert "search.methods: no method 'FedPAC'" in code
    asked.clear()
    own["FedPer"] = {epochs: {"choices": [1, 2]}}  # the other one's search stays
    play(write_study(tmp_path, search={**search, "methods": own}), "--restart")
    assert [list(one.space) for one in asked] == [[lr, epochs]]


def test_results_of_other_options_are_not_in_the_report(tmp_path, play, capsys):
    path = write_study(tmp_path)
    play(path)
    changed = {**METHODS, "FedPer": {"model": {"method": {"class_path": "FedPer", "init_args": {"lr": 0.5}}}}}
    main(["study", str(write_study(tmp_path, methods=changed)), "--report-only"])
    said = capsys.readouterr().out
    lr = "model.method.init_args.lr: 0.05 -> 0.5"
    assert f"Missing: FedPer, seed 0 (made with other options: {lr})." in said
    table = json.loads((tmp_path / "runs" / "studies" / "tiny" / "table.md").read_text())[2]
    assert [len(row[3]) for row in table] == [1, 0]


def test_runs_of_other_options_are_refused_before_a_search(tmp_path, play, monkeypatch):
    monkeypatch.setattr("pfl_lightning.study.tuner.search_options", lambda *args, **options: 1 / 0)
    play(write_study(tmp_path, methods={"FedAvg": METHODS["FedAvg"]}))
    code, _ = play(write_study(tmp_path, search=SEARCH), "--trainer.max_epochs", "5")
    assert "has 1 run made with different options" in code


def test_a_run_that_the_system_kills(tmp_path, play, capsys):
    path = write_study(tmp_path)
    code, _ = play(path, codes={"FedPer": [-signal.SIGKILL]})
    assert code == 1
    said = capsys.readouterr().out
    assert "FedPer, seed 0 ended by SIGKILL, perhaps out of memory" in said
    assert "Missing: FedPer, seed 0 (ended by SIGKILL, perhaps out of memory)." in said
    assert "Fewer --processes need less memory" in said
    code, _ = play(path, "--retry", "1", codes={"FedPer": [-signal.SIGKILL]})
    assert code == 0
    assert "perhaps out of memory. It is tried again" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(tmp_path, play):
    path = write_study(tmp_path)
    code, commands = play(path, "--output", f"{path}/out")
    assert f"Not a directory: '{path}/out/runs/all/" in code
    assert commands == []


def test_a_disk_that_is_full_in_the_middle_of_a_study(tmp_path, play, monkeypatch):
    """The runs under way are ended in order, and the command says what to do."""

    def lock(folder):
        if folder.parent.name == "FedPer":
            raise OSError(errno.ENOSPC, "No space left on device")
        return RunLock(folder)

    path = write_study(tmp_path)
    monkeypatch.setattr(runner, "RunLock", lock)
    code, commands = play(path, "--processes", "2", endless=True)
    assert re.search(r"tiny cannot be written \(No space left on device\): .* are free in .*; make room", code)
    assert len(commands) == 1
    monkeypatch.setattr(runner, "RunLock", RunLock)
    code, commands = play(path)
    assert (code, len(commands)) == (0, 2)


def test_other_options_of_a_searched_row_are_refused_before_it_is_searched_again(tmp_path, play, monkeypatch, capsys):
    asked = []
    found = {"model.method.init_args.lr": 0.05}
    monkeypatch.setattr(
        "pfl_lightning.study.tuner.search_options", lambda *args, **options: asked.append(args) or found
    )
    path = write_study(tmp_path, methods={"FedPer": METHODS["FedPer"]}, search=SEARCH)
    assert play(path)[0] == 0
    assert "all/FedPer: the search took lr=0.05\n" in capsys.readouterr().out
    code, commands = play(path, "--trainer.max_epochs", "7")
    assert "FedPer, seed 0: trainer.max_epochs: 2 -> 7\n" in code
    assert (len(asked), commands) == (1, [])
    main(["study", str(path), "--report-only", "--trainer.max_epochs", "7"])
    assert "FedPer, seed 0 (made with other options: trainer.max_epochs: 2 -> 7)" in capsys.readouterr().out
    assert play(path) == (0, [])  # the first search still counts
    code, commands = play(path, "--trainer.max_epochs", "7", "--restart")
    assert (code, len(asked), len(commands)) == (0, 2, 1)


def test_a_search_that_has_changed_is_refused_before_its_first_trial(tmp_path, play, monkeypatch, capsys):
    """The runs behind the earlier one, and their table, stay; the earlier file finds them again."""
    asked = []
    found = {"model.method.init_args.lr": 0.05}
    monkeypatch.setattr(
        "pfl_lightning.study.tuner.search_options", lambda *args, **options: asked.append(args) or found
    )
    methods = {"FedPer": METHODS["FedPer"]}
    before = write_study(tmp_path, methods=methods, search=SEARCH)
    text = before.read_text()
    assert play(before)[0] == 0
    after = write_study(tmp_path, methods=methods, search={**SEARCH, "trials": SEARCH["trials"] + 1})
    main(["study", str(after), "--check"])
    assert "changed    FedPer, seed 0: what another search has found" in capsys.readouterr().out
    code, commands = play(after)
    assert "has 1 run made with different options:\nFedPer, seed 0: what another search has found\n" in code
    assert (len(asked), commands) == (1, [])
    found["model.method.init_args.lr"] = 0.1
    assert play(after, "--restart")[0] == 0
    assert len(asked) == 2
    before.write_text(text)
    play(before, "--restart")
    assert len(asked) == 2  # what the first search found is still known


def test_a_search_that_fails_does_not_end_the_others(tmp_path, play, monkeypatch, capsys):
    def find(search, config, folder, **options):
        if folder.name == "FedAvg":
            raise NoTrialError("no trial of the search succeeded: NaN")
        return {"model.method.init_args.lr": 0.05}

    monkeypatch.setattr("pfl_lightning.study.tuner.search_options", find)
    code, commands = play(write_study(tmp_path, search={**SEARCH, "methods": ["FedAvg", "FedPer"]}))
    assert (code, len(commands)) == (1, 1)
    assert "pfl: all/FedAvg: no trial of the search succeeded: NaN" in capsys.readouterr().out
    table = json.loads((tmp_path / "runs" / "studies" / "tiny" / "table.md").read_text())
    assert table[1] == "Missing: FedAvg, seed 0 (no trial of its search succeeded)."


def test_a_folder_of_the_trainer_moves_no_run(tmp_path, play):
    """Relative folders of runs lie below the Trainer's folder: those of a study do not."""
    path = write_study(tmp_path)
    assert play(path, "--trainer.default_root_dir", str(tmp_path / "elsewhere"))[0] == 0
    run = tmp_path / "runs" / "studies" / "tiny" / "runs" / "all" / "FedAvg" / "seed_0"
    assert yaml.safe_load((run / "run.yaml").read_text())["run_dir"] == str(run)
    assert play(path, "--trainer.profiler", "simple", "--trainer.log_every_n_steps", "5") == (0, [])


def test_a_search_says_first_how_much_it_is_and_runs_as_many_trials_at_once(tmp_path, play, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "pfl_lightning.study.tuner.search_options", lambda *args, **options: asked.append(options) or {}
    )
    monkeypatch.setattr(conduct, "cores", lambda: 4)
    play(write_study(tmp_path, search=SEARCH), "--threads", "2")
    assert "searching options of FedPer: 3 trials of 2 rounds each come first\n" in capsys.readouterr().out
    assert asked[0]["processes"] == 2


@pytest.mark.slow
def test_a_restart_moves_nothing_for_a_config_that_does_not_fit(tmp_path, play):
    path = write_study(tmp_path)
    play(path, checked=False)
    code, commands = play(path, "--restart", "--model.method.epocs", "5", checked=False)
    assert "Option 'epocs' is not accepted" in code
    assert commands == []
    assert not (tmp_path / "runs" / "studies" / "tiny" / "replaced").exists()
    code, _ = play(path, "--model.method.epocs", "5", checked=False)  # no option that was changed, but none at all
    assert "Option 'epocs' is not accepted" in code


@pytest.mark.parametrize("place", [".", "version_0"])
def test_a_restart_leaves_runs_of_another_command_alone(tmp_path, play, place):
    path = write_study(tmp_path)
    play(path)
    folder = tmp_path / "runs" / "studies" / "tiny" / "runs" / "all" / "FedPer" / "seed_0"
    with RunLock(folder / place):
        code, commands = play(path, "--restart", "--trainer.max_epochs", "5")
    assert "FedPer, seed 0 is being run by another command: stop it first" in code
    assert commands == []
    assert not (tmp_path / "runs" / "studies" / "tiny" / "replaced").exists()


def test_a_number_of_tries_is_not_negative(capsys):
    with pytest.raises(SystemExit):
        main(["study", "tiny.yaml", "--retry", "-1"])
    assert "argument --retry: must be a whole number of at least 0, got -1" in capsys.readouterr().err


def test_the_gpu_script_says_that_it_needs_the_repository(tmp_path):
    """It ships with the studies."""
    folder = tmp_path / "pfl_lightning" / "studies"
    folder.mkdir(parents=True)
    shutil.copy(Path(pfl_lightning.__file__).parent / "studies" / "gpu.sh", folder)
    ended = subprocess.run(["bash", str(folder / "gpu.sh"), "1"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "call it in a checkout" in ended.stderr
