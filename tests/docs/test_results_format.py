"""The page of results shows the JSON schema that ships with the package, not a copy."""

import json
import re
from importlib.resources import files
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results_format.md"
SHIPPED = json.loads((files("pfl_lightning.callbacks") / "results.schema.json").read_text())


def test_the_schema_of_the_page_is_the_one_that_ships():
    text = PAGE.read_text()
    (included,) = re.findall(r"^```\{literalinclude\} (\S+)$", text, flags=re.MULTILINE)
    (download,) = re.findall(r"\{download\}`[^`<]*<(\S+)>`", text)
    for path in (included, download):
        assert json.loads((PAGE.parent / path).read_text()) == SHIPPED


def test_every_key_of_results_is_explained():
    text = PAGE.read_text()
    for key in SHIPPED["properties"]:
        assert f"`{key}`" in text, key
