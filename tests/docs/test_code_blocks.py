"""Commands and code in the README and the docs: every `pfl` command is parsed, every Python block compiles."""

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from pfl_lightning.cli import main
from pfl_lightning.cli.commands import OTHER_COMMANDS
from pfl_lightning.cli.exported import exported_parser
from pfl_lightning.cli.federated_cli import FederatedCLI
from pfl_lightning.cli.parser import expand_engine_option
from pfl_lightning.study.command import parse_arguments, study_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "reference" not in page.parts and page.name != "hyperparameters.md"]


def blocks(page, *languages):
    """Fenced code blocks of a page in some languages."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands(page):
    """Commands that begin with `pfl`, in fenced and in indented blocks, as lists of words."""
    indented = re.findall(r"^    ((?:[^\n\\]|\\\n|\\.)+)", page.read_text(), flags=re.MULTILINE)
    for text in [*blocks(page, "bash", "sh", "console"), *indented]:
        for line in text.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            words = shlex.split(line, comments=True) if line.startswith(("pfl ", "pip ")) else []
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                if words[0] == "pfl":
                    yield words[1:end]
                words = words[end + 1 :]


COMMANDS = sorted({tuple(words) for page in PAGES for words in commands(page)})


@pytest.fixture(scope="module")
def parser():
    """The command line's own parser, with the options of every subcommand: none is typed, and nothing is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "parse_arguments", lambda self, *_: setattr(self, "config", {"subcommand": "fit"}))
        for hook in ("before_instantiate_classes", "instantiate_classes", "_set_seed"):
            patch.setattr(FederatedCLI, hook, lambda self: None)
        patch.setattr(FederatedCLI, "_run_subcommand", lambda self, subcommand: None)
        return FederatedCLI(args=[]).parser


def test_there_are_commands():
    assert len(COMMANDS) >= 20, COMMANDS


def test_wrong_commands_are_found(parser, monkeypatch):
    monkeypatch.chdir(ROOT)
    for wrong in ("--config configs/no_such.yaml", "--config configs/fedpac_digits.yaml --loop.cohorts 0.5"):
        with pytest.raises(SystemExit):
            parser.parse_args(["fit", *wrong.split()])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command(parser, words, monkeypatch, tmp_path):
    """Options exist, their values fit, and so does the config."""
    monkeypatch.chdir(ROOT)
    if "patients.yaml" in words:  # which the page itself gives
        (tmp_path / "patients.yaml").write_text(blocks(ROOT / "docs" / "own_clients.md", "yaml")[0])
        monkeypatch.chdir(tmp_path)
    name, *options = words
    if any(word.endswith(("--help", ".help")) for word in options):
        with pytest.raises(SystemExit, match="0"):
            sys.exit(main(list(words)) or 0)
        return
    if name in ("study", "reproduce"):
        assert parse_arguments(study_parser(name, "FILE", ""), options).study or not options
        return
    if name == "predict" and "--exported" in options:
        assert exported_parser().parse_args(options).exported
        return
    if name in OTHER_COMMANDS:
        assert name == "methods" or options, f"pfl {name} takes the folders of runs"
        return
    assert parser.parse_args(expand_engine_option([name, *options]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page):
    for text in blocks(page, "python", "py"):
        assert ast.parse(text).body


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_blocks_use_can_be_imported(page):
    """Names that are imported from the package exist there."""
    for text in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pfl_lightning":
                if page.name == "CONTRIBUTING.md" and node.module == "pfl_lightning.methods.mimelite":
                    continue  # of the method that is written there
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_a_clone(page):
    """Those of the index, which is read in the built site, may lead to pages that are generated."""
    generated = {"hyperparameters.md", "reference/index.md"} if page == ROOT / "docs" / "index.md" else set()
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = {target for target in found if "://" not in target and not target.startswith("mailto:")} - generated
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_blocks_parse(page):
    for text in blocks(page, "yaml"):
        assert yaml.safe_load(text)


def test_there_is_python():
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 6
