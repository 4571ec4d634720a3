"""Words that readers stopped at do not come back, in documents and in code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEVER = (
    "likewise",
    "for want of",
    "makes of it",
    "the other way round",
    "of that name",
    "bit by bit",
    "(go|goes|gone) on with",
)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
CODE = [path for room in ("pfl_lightning", "callbacks", "datamodules") for path in ROOT.glob(f"{room}/**/*.py")]


@pytest.mark.parametrize("files", [PAGES, CODE], ids=["pages", "code"])
def test_words_that_are_not_used(files):
    assert len(files) > 50
    pattern = re.compile("|".join(rf"\b{phrase}\b" for phrase in NEVER), re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
