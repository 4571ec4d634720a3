"""The page of results shows the JSON schema that ships with the package, not a copy, and explains what files have."""

import csv
import json
import re
from importlib.resources import files
from pathlib import Path

from _helpers.toy import run

from pfl_lightning.cli.personalize import write_personalization
from pfl_lightning.methods import FedAvg
from pfl_lightning.phases import Personalization

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


def test_everything_in_the_files_of_a_personalization_is_explained(tmp_path):
    write_personalization(run(FedAvg, 1), Personalization(), tmp_path, 1)
    _, section = PAGE.read_text().split("\n## personalized.json\n")
    section, *_ = section.split("\n## ")
    content = json.loads((tmp_path / "personalized.json").read_text())
    with (tmp_path / "personalized.csv").open() as file:
        columns = next(csv.reader(file))
    for name in (*content, *content["personalization"], *content["participating"], *columns):
        assert f"`{name}`" in section, name
