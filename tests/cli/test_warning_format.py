"""Warnings as ``pfl`` prints them: the package's own as sentences, others as Python and Lightning do."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from _helpers.finished import write_run

import pfl_lightning
from pfl_lightning.cli.warning_format import show_own_warnings_plainly

OWN = str(Path(pfl_lightning.__file__).parent / "report" / "rows.py")


@pytest.fixture(autouse=True)
def python_format(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", lambda *args, **kwargs: f"other: {args[0]}\n")


def test_own_warnings_are_sentences_and_others_are_not_touched():
    show_own_warnings_plainly()
    show_own_warnings_plainly()
    assert warnings.formatwarning("no images", UserWarning, OWN, 3) == "pfl: warning: no images\n"
    assert warnings.formatwarning("no images", UserWarning, "/elsewhere/project.py", 3) == "other: no images\n"
    assert warnings.formatwarning("old", DeprecationWarning, OWN, 3) == "other: old\n"


def test_a_format_that_is_set_later_is_kept_below():
    show_own_warnings_plainly()
    warnings.formatwarning = lambda *args, **kwargs: f"later: {args[0]}\n"
    show_own_warnings_plainly()
    assert warnings.formatwarning("no images", UserWarning, OWN, 3) == "pfl: warning: no images\n"
    assert warnings.formatwarning("no images", UserWarning, "/elsewhere/project.py", 3) == "later: no images\n"


def test_a_run_that_is_not_finished_is_named_in_a_sentence(tmp_path):
    run = write_run(tmp_path / "run", finished=False)
    words = [sys.executable, "-m", "pfl_lightning.cli", "compare", str(run), "--output", str(tmp_path / "out")]
    done = subprocess.run([*words, "--format", "csv"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "pfl: warning: " in done.stderr
    assert "is not finished" in done.stderr
    assert ".py" not in done.stderr
