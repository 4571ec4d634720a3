"""What `pfl fit` and `pfl test` say at their end."""

import io
from types import SimpleNamespace

import pytest
from _helpers.configs import digits_config
from rich.console import Console

from pfl_lightning.callbacks.tables import fit_table
from pfl_lightning.cli import main
from pfl_lightning.cli import tables as evaluations
from pfl_lightning.metrics import EvalMetrics, summarize


def test_a_run_without_an_evaluation_says_why_and_how_to_get_one(tmp_path, capsys):
    rare = {"trainer.max_epochs": 2, "trainer.check_val_every_n_epoch": 5, "trainer.enable_model_summary": False}
    file = digits_config(tmp_path, rare)
    main(["fit", "--config", file])
    said = capsys.readouterr().out.splitlines()[-1]
    checkpoint = tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt"
    assert "without accuracies: no round was evaluated (check_val_every_n_epoch is 5, and the run has 2 rounds)" in said
    assert f"`pfl test --ckpt_path {checkpoint}`" in said
    main(["test", "--config", file, "--ckpt_path", str(checkpoint)])
    assert (checkpoint.parent.parent / "test.json").is_file()


@pytest.mark.parametrize("every", [1, 2])
def test_nothing_is_said_where_a_round_was_evaluated(tmp_path, capsys, every):
    changes = {"trainer.max_epochs": 2, "trainer.check_val_every_n_epoch": every, "trainer.enable_model_summary": False}
    main(["fit", "--config", digits_config(tmp_path, changes)])
    assert "without accuracies" not in capsys.readouterr().out


def test_an_evaluation_without_batches_says_why(tmp_path, capsys):
    file = digits_config(tmp_path, {"trainer.max_epochs": 1, "trainer.enable_model_summary": False})
    main(["fit", "--config", file])
    for command, limit in (("test", "limit_test_batches"), ("validate", "limit_val_batches")):
        capsys.readouterr()
        main([command, "--config", file, "--ckpt_path", "last", f"--trainer.{limit}", "0"])
        assert f"{limit} is 0: nothing was evaluated" in capsys.readouterr().out


def lines_of(table):
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()


def test_a_terminal_of_80_columns_shows_evaluations_in_full():
    """The widest figures there are: of all right, of half right, and of ten thousand clients."""
    scores = {client: EvalMetrics(1.0, 0.0, 1) for client in range(10_000)}
    scores |= {client: EvalMetrics(client % 2, 0.0, 1) for client in range(10_000, 10_100)}
    data = SimpleNamespace(novel=list(range(10_000, 10_100)))
    federation = SimpleNamespace(
        data=data, test_scores=scores, method_name="FedAvg", never_trained=[0], class_metrics={}
    )
    lines = lines_of(evaluations.evaluation_table("FedAvg", federation))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert cells == [
        ["9999 participating", "100.00", "0.00", "0.00", "100.00", "100.00", "100.00"],
        ["1 never trained", "100.00", "0.00", "0.00", "100.00", "100.00", "100.00"],
        ["100 novel", "50.00", "50.00", "2500.00", "0.00", "100.00", "0.00"],
    ]


def test_a_terminal_of_80_columns_shows_the_results_of_a_fit_in_full(monkeypatch):
    monkeypatch.setitem(fit_table.__globals__, "score_name", lambda federation, part: "test accuracy")
    choices = ("last", "validation_selected", "best_test")
    writer = SimpleNamespace(
        evaluated_clients=5,
        summaries=lambda part: dict.fromkeys(choices, summarize({0: 1.0, 1: 1.0})),
        chosen=dict.fromkeys(choices, SimpleNamespace(round=1000, test={0: 1.0, 1: 0.5, 2: 0.0})),
    )
    named = {"method_name": "FedAvg", "data": SimpleNamespace()}
    federation = SimpleNamespace(num_clients=10, never_trained=[2, 7], class_metrics={}, **named)
    lines = lines_of(fit_table(federation, writer))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert cells == [[choice, "1000", "100.00", "0.00", *["100.00"] * 3] for choice in choices]
    below = " ".join(" ".join(lines[lines.index(next(line for line in lines if line.startswith("└"))) + 1 :]).split())
    assert below.startswith("2 clients never trained (2, 7; mean 0.00 %, of the other 2: 75.00 %): no round drew them")
