"""Standard output that cannot be written is named, and no file is blamed for it."""

import os
import sys
from contextlib import suppress

import pytest
from _helpers.configs import digits_config

from pfl_lightning.cli import main


def said_by(words, buffering):
    """What a command says whose standard output is full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with (
        pytest.MonkeyPatch.context() as patch,
        suppress(OSError),
        open("/dev/full", "w", buffering=buffering) as full,
    ):
        patch.delenv("PFL_DEBUG", raising=False)
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(words)
    return str(ended.value)


@pytest.mark.parametrize("buffering", [1, -1], ids=["line by line", "in blocks"])
@pytest.mark.parametrize("words", [["--help"], ["methods"], ["--version"]])
def test_a_command(words, buffering):
    assert said_by(words, buffering).startswith("pfl: standard output cannot be written (No space left on device)")


@pytest.mark.parametrize("buffering", [1, -1], ids=["line by line", "in blocks"])
def test_a_run_whose_folder_has_room(tmp_path, buffering):
    said = said_by(["fit", "--config", digits_config(tmp_path, {"trainer.logger": False})], buffering)
    assert said.startswith("pfl: standard output cannot be written (No space left on device)")
    assert "resumed" in said
    assert str(tmp_path) not in said
