"""Fixtures of the inspection tests."""

import pytest


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Without a logger, pictures lie in the working folder."""
    monkeypatch.chdir(tmp_path)
