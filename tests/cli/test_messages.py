"""Wrong values on the command line: a line that names the option, what was expected and what came."""

from pathlib import Path

import pytest

from pfl_lightning.cli import main
from pfl_lightning.cli.messages import shorten

CONFIG = Path(__file__).parents[2] / "configs" / "calibre_digits.yaml"

WRONG = {
    "--trainer.max_epochs many": "trainer.max_epochs: expected int or null, got many",
    "--loop.cohort some": "loop.cohort: expected int or float, got some",
    "--data.init_args.batch_size many": "data.batch_size: expected int, got many",
    "--data.init_args.novel_clients some": "data.novel_clients: expected int or float, got some",
    "--data.init_args.partition.init_args.num_clients 0": "num_clients must be a whole number of at least 1, got 0",
    "--data.init_args.partition.init_args.number 3": "data.partition: Option 'number' is not accepted",
    "--data.init_args.partition Alike": "data.partition: expected a class, got Alike",
    "--data Alike": "data: expected a class or null, got Alike",
    "--model.method FedEverything": "model.method: expected a class, got FedEverything",
    "--model.method.init_args.nope 3": "model.method: Option 'nope' is not accepted. Got value: Namespace(",
    "--engine fast": "engine: expected one of ['sequential', 'vectorized', 'ray', 'trainer'] or null, got fast",
    "--personalize yes": "personalize: expected a class or null, got yes",
    "--personalize.epochs 0": "personalize.epochs must be at least 1, got 0",
    "--personalize.epochs many": "personalize.epochs: expected int, got many",
    "--personalize.lr -1": "personalize.lr must be a finite number above 0, got -1.0",
    "--personalize.steps 3": "personalize: Option 'steps' is not accepted",
    "--personalize.train tail": "personalize.train: expected one of ['linear', 'head', 'all'], got tail",
}


@pytest.mark.parametrize(("flag", "line"), WRONG.items(), ids=WRONG)
@pytest.mark.parametrize("command", ["fit", "personalize"])
@pytest.mark.filterwarnings("ignore:pfl personalize without --ckpt_path")
def test_a_wrong_value(tmp_path, capsys, monkeypatch, command, flag, line):
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    with pytest.raises(SystemExit) as found:
        main([command, "--config", str(CONFIG), "--run_dir", str(tmp_path), *flag.split()])
    said = found.value.code if isinstance(found.value.code, str) else capsys.readouterr().err
    said = said[said.index("pfl: ") :].splitlines()
    assert said[0].startswith(f"pfl: {line}")
    assert said[0] == f"pfl: {line}" or line.endswith("(")
    rest = ("known ", "options of ", "did you mean", "(all options", "(PFL_DEBUG=1")
    assert all(text.startswith(rest) for text in said[1:])


@pytest.mark.parametrize("message", ["one line", "two lines\n  - of another kind", 'Parser key "a": at once', ""])
def test_other_messages_stay(message):
    assert shorten(message) == message


def test_a_misspelt_option_lists_the_right_ones(tmp_path, capsys):
    flags = ["--model.method.init_args.epoch", "3", "--run_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(CONFIG), *flags])
    hint = capsys.readouterr().err.splitlines()[1]
    assert hint.startswith("did you mean 'epochs'? options of Calibre: aggregation, alpha_n, ")
    assert {"lr", "epochs", "eval_model"} <= set(hint.partition("Calibre: ")[2].split(", "))
