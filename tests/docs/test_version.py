"""One version everywhere, and documents as long as they may be."""

import re
from pathlib import Path

import yaml

import pfl_lightning

ROOT = Path(__file__).parents[2]


def test_the_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [(version, date) for version, date in headings if version != "Unreleased"]
    assert released[0] == (pfl_lightning.__version__, str(citation["date-released"]))
    assert citation["version"] == pfl_lightning.__version__
    numbers = [tuple(map(int, version.split("."))) for version, _ in released]
    assert numbers == sorted(numbers, reverse=True)


def test_the_first_pages_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 250
