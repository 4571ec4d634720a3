"""One version everywhere, and documents that are short enough to be read."""

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


def words(path):
    """Words of a page outside of the tables that a script writes."""
    kept, generated = [], False
    for line in path.read_text().splitlines():
        generated = line.startswith("<!-- measured") or (generated and line.startswith("|"))
        kept += [] if generated else line.replace("|", " ").split()
    return len(kept)


def test_the_documents_are_short():
    apart = {"decisions", "reference"}  # the first is counted below; a build of the site writes the second
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in apart]
    pages = [path for path in pages if path.name != "hyperparameters.md"]
    assert len(pages) > 90
    assert sum(map(words, pages)) <= 60_000
    assert [str(path) for path in pages if words(path) > 3_000] == []
    assert sum(map(words, (ROOT / "docs" / "decisions").glob("*.md"))) <= 8_000
