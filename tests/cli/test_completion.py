"""`pfl completion bash`: the shell completes subcommands, options and names."""

import shutil
import subprocess

import pytest

from pfl_lightning.cli import main
from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS

pytest.importorskip("shtab")

COMPLETE = """
source {script}
words=({words} "{begun}")
function=$(complete -p pfl | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("${{words[@]}}") COMP_CWORD=$((${{#words[@]}} - 1))
$function pfl "{begun}" "${{words[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """What bash offers for the beginning of a word behind others."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    script = tmp_path_factory.mktemp("completion") / "pfl.sh"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", script.write_text)
        main(["completion", "bash"])

    def offered(words, begun):
        program = COMPLETE.format(script=script, words=words, begun=begun)
        found = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
        return {word.strip() for word in found.stdout.splitlines()}

    return offered


def test_subcommands(complete):
    assert {*TRAINER_COMMANDS, *OTHER_COMMANDS} <= complete("pfl", "")
    assert complete("pfl", "pers") == {"personalize"}


def test_options(complete):
    assert {"--loop.cohort", "--loop.eval_cohort"} <= complete("pfl fit", "--loop.")
    assert complete("pfl fit", "--model.method.l") >= {"--model.method.lr"}
    assert complete("pfl export", "--outp") == {"--output"}


def test_names(complete):
    assert complete("pfl fit --engine", "") == {"sequential", "vectorized", "processes", "ray", "trainer"}
    assert "FedPAC" in complete("pfl fit --model.method", "Fed")
    assert complete("pfl fit --data", "Dig") == {"Digits"}


def test_studies(complete):
    assert {"digits", "fedpac-table1"} <= complete("pfl reproduce", "")
    assert complete("pfl reproduce", "fedpac-table1-c") == {"fedpac-table1-cinic10"}
    assert complete("pfl study", "--rep") == complete("pfl reproduce digits", "--rep") == {"--report-only"}


def test_comparisons(complete):
    assert {"--choice", "--figure", "--format", "--reference"} <= complete("pfl compare", "--")
    assert "validation_selected" in complete("pfl compare --choice", "")


def test_commands_without_options_of_runs(complete):
    assert complete("pfl completion", "") == {"bash", "zsh", "tcsh"}
    assert complete("pfl methods", "--het") == {"--heterogeneous"}
    assert "FedPAC" in complete("pfl methods", "FedP")
    assert complete("pfl fit --personalize.train", "") == {"linear", "linear+encoder", "head", "all", "nothing"}


def test_files_are_offered_for_all_else(capsys):
    main(["completion", "bash"])
    assert "\ncomplete -o default " in capsys.readouterr().out


def test_without_shtab(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    with pytest.raises(SystemExit, match="needs shtab: pip install"):
        main(["completion", "zsh"])
