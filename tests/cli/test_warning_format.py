"""Warnings as ``pfl`` prints them: the package's own as sentences, others as Python and Lightning do."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from _helpers.finished import write_run

import pfl_lightning
from pfl_lightning.cli import main
from pfl_lightning.cli.main import without_place

OWN = str(Path(pfl_lightning.__file__).parent / "report" / "rows.py")


@pytest.mark.parametrize(
    ("category", "file", "line", "shown"),
    [
        (UserWarning, OWN, None, "pfl: warning: no images\n"),
        (UserWarning, OWN, "    warnings.warn(", "pfl: warning: no images\n"),
        (UserWarning, "/elsewhere/project.py", "code()", "/elsewhere/project.py:3: UserWarning: no images\n  code()\n"),
        (DeprecationWarning, OWN, "code()", f"{OWN}:3: DeprecationWarning: no images\n  code()\n"),
    ],
)
def test_own_warnings_are_sentences_and_others_are_not_touched(category, file, line, shown):
    message = warnings.WarningMessage("no images", category, file, 3, line=line)
    assert without_place(warnings._formatwarnmsg_impl(message)) == shown


def test_lightnings_form_of_a_warning_is_a_sentence_too():
    lightning = pytest.importorskip("lightning.fabric.utilities.warnings")
    formatted = lightning._custom_format_warning("no images", UserWarning, OWN, 3)
    assert "UserWarning" not in formatted  # the path has "lightning" in it
    assert without_place(formatted) == "pfl: warning: no images\n"


def test_a_program_that_calls_main_sees_warnings_as_ever(capsys):
    shown, format = warnings.showwarning, warnings.formatwarning
    main(["--version"])
    assert (warnings.showwarning, warnings.formatwarning) == (shown, format)


def test_a_run_that_is_not_finished_is_named_in_a_sentence(tmp_path):
    run = write_run(tmp_path / "run", finished=False)
    words = [sys.executable, "-m", "pfl_lightning.cli", "compare", str(run), "--output", str(tmp_path / "out")]
    done = subprocess.run([*words, "--format", "csv"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "pfl: warning: " in done.stderr
    assert "is not finished" in done.stderr
    assert ".py" not in done.stderr
