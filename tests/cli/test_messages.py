"""Wrong values on the command line: a line that names the option, what was expected and what came."""

import re
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
    "--data.init_args.partition.init_args.num_clients 0": "num_clients must be at least 1, got 0",
    "--data.init_args.partition.init_args.number 3": "data.partition: Option 'number' is not accepted",
    "--data.init_args.partition Alike": "data.partition: expected a class, got Alike",
    "--data Alike": "data: expected a class or null, got Alike",
    "--model.method FedEverything": "model.method: expected a class, got FedEverything",
    "--model.method.init_args.nope 3": "model.method: Option 'nope' is not accepted",
    "--model.method.init_args.lr many": "model.method.lr: expected float, got many",
    "--model.method.init_args.lr -1": "lr must be a finite number of at least 0, got -1.0",
    "--trainer.accelerator cpu --trainer.num_nodes 2": (
        "a federation runs in one process; the Trainer has 2. Use devices=1"
    ),
    "--personalize.lr 1e30": "personalize.lr must be at most 1e+06, got 1e+30",
    "--engine fast": "engine: expected one of ['sequential', 'vectorized', 'processes', 'ray', 'trainer'] or null, "
    "got fast",
    "--personalize yes": "personalize: expected a class or null, got yes",
    "--personalize.epochs 0": "personalize.epochs must be at least 1, got 0",
    "--personalize.epochs many": "personalize.epochs: expected int, got many",
    "--personalize.lr -1": "personalize.lr must be a finite number above 0, got -1.0",
    "--personalize.steps 3": "personalize: Option 'steps' is not accepted",
    "--personalize.train tail": "personalize.train: expected one of ['linear', 'linear+encoder', 'head', 'all', "
    "'nothing'], got tail",
}


@pytest.mark.parametrize(
    ("command", "flag", "line"),
    [
        pytest.param(
            command,
            flag,
            line,
            id=f"{command}-{flag}",
            # Their parsers are made alike.
            marks=pytest.mark.slow if command == "personalize" and "--personalize" not in flag else (),
        )
        for command in ("fit", "personalize")
        for flag, line in WRONG.items()
    ],
)
def test_a_wrong_value(tmp_path, capsys, monkeypatch, command, flag, line):
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    trained = ["--ckpt_path", str(CONFIG)] if command == "personalize" else []  # which is not read yet
    with pytest.raises(SystemExit) as found:
        main([command, "--config", str(CONFIG), "--run_dir", str(tmp_path), *trained, *flag.split()])
    assert found.value.code == 2
    said = capsys.readouterr().err
    said = said[said.index("pfl: ") :].splitlines()
    assert said[0] == f"pfl: {line}"
    rest = ("known ", "options of ", "did you mean", "(all options", "(PFL_DEBUG=1")
    assert all(text.startswith(rest) for text in said[1:])


@pytest.mark.parametrize("message", ["one line", "two lines\n  - of another kind", ""])
def test_other_messages_stay(message):
    assert shorten(message) == message


def test_a_line_names_the_option_alone():
    assert shorten('Parser key "a.b": at once') == "a.b: at once"


def test_a_misspelt_option_lists_the_right_ones(tmp_path, capsys):
    flags = ["--model.method.init_args.epoch", "3", "--run_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(CONFIG), *flags])
    hint = capsys.readouterr().err.splitlines()[1]
    assert hint.startswith("did you mean 'epochs'? options of Calibre: aggregation, alpha_n, ")
    assert {"lr", "epochs", "eval_model"} <= set(hint.partition("Calibre: ")[2].split(", "))


def said_of(tmp_path, capsys, text):
    """What is said of a config that changes another one."""
    change = tmp_path / "change.yaml"
    change.write_text(text)
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(CONFIG), "--config", str(change), "--run_dir", str(tmp_path)])
    return capsys.readouterr().err


def test_the_options_are_those_of_the_class_that_has_the_mistake(tmp_path, capsys):
    optimizer = "{class_path: torch.optim.Adam, init_args: {lrr: 0.1}}"
    said = said_of(tmp_path, capsys, f"model: {{method: {{init_args: {{optimizer: {optimizer}}}}}}}")
    assert said.startswith(
        "pfl: model.method.optimizer: Option 'lrr' is not accepted\ndid you mean 'lr'? options of Adam: "
    )
    stop = "{class_path: EarlyStopping, init_args: {monitr: val_accuracy/mean}}"
    said = said_of(tmp_path, capsys, f"trainer: {{callbacks: [{stop}]}}")
    expected = (
        "pfl: trainer.callbacks: Option 'monitr' is not accepted\ndid you mean 'monitor'? options of EarlyStopping: "
    )
    assert said.startswith(expected)


def test_an_option_that_stands_where_the_encoder_belongs(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_first.py").write_text(
        "from pfl_lightning.methods import FedAvg\n\n\nclass First(FedAvg):\n"
        "    def __init__(self, scale: float = 1.0, **options):\n        super().__init__(**options)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said = said_of(tmp_path, capsys, "model: {method: {class_path: own_first.First, init_args: {scale: 2}}}")
    assert "the option 'scale' of First is not in its signature" in said
    assert "(of a client: after encoder, num_classes, *)" in said


def test_no_list_of_methods_for_a_wrong_value_of_one(tmp_path, capsys):
    said = said_of(tmp_path, capsys, "model: {method: {init_args: {optimizer: os.system}}}")
    assert "known methods" not in said
    said = said_of(tmp_path, capsys, "model: {method: os.system}")
    assert "known methods: APFL" in said


def test_a_long_value_is_cut(tmp_path, capsys):
    said = said_of(tmp_path, capsys, f"model: {{method: {{init_args: {{lr: {list(range(500))}}}}}}}")
    assert said.startswith("pfl: model.method.lr: expected float, got [0, 1, 2")
    assert len(said) < 300


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer: {max_epochs: 3, max_epochs: 4}", "max_epochs"),
        ("a: 1\nb: 2\na: 3", "a"),
        ("? [1, 2]\n: 1\nb: 1\nb: 2", "b"),
    ],
)
def test_a_key_that_is_given_twice(tmp_path, capsys, text, key):
    assert f"'{key}' is given twice, in lines " in said_of(tmp_path, capsys, text)


@pytest.mark.parametrize("text", ["trainer: " + "[" * 3000 + "]" * 3000, "a: &a [*a]\nb: 1"])
def test_endless_nesting(tmp_path, text):
    change = tmp_path / "change.yaml"
    change.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(CONFIG), "--config", str(change), "--run_dir", str(tmp_path)])
    assert stopped.value.code == 2 or "nested" in stopped.value.code


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"model: [unclosed\ndata: {",
            r"change\.yaml cannot be read as YAML: .*did not find expected .*line 2, column",
        ),
        (b"model:\n\tmethod: FedEM", r"change\.yaml cannot be read as YAML: .*found character .*line 2, column 1"),
        (b"a: 'x\x01y'", r"change\.yaml cannot be read as YAML: .*control characters|special characters"),
        (b"- FedEM", r"change\.yaml holds list; a config is a mapping with keys such as model, data and trainer"),
        (b"FedEM", r"change\.yaml holds str; a config is a mapping"),
        (b"# nothing", r"change\.yaml is empty; a config is a mapping"),
        (b"\xfd\x00", r"change\.yaml cannot be read as YAML: .*decode"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "partition"])
def test_a_config_that_cannot_be_read_is_named(tmp_path, capsys, command, content, said):
    change = tmp_path / "change.yaml"
    change.write_bytes(content)
    with pytest.raises(SystemExit, match=r"^2$"):
        main([command, f"--config={CONFIG}", "--config", str(change)])
    found = capsys.readouterr().err
    assert re.search(said, found)
    assert found.count("\n") == 1
