"""The page of results shows the JSON schema that ships with the package, not a copy, and explains what files have."""

import csv
import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest
from _helpers.toy import run

from pfl_lightning.cli.tables import write_personalization
from pfl_lightning.methods import FedAvg
from pfl_lightning.phases import Personalization, Trained

PAGE = Path(__file__).parents[2] / "docs" / "results_format.md"
SHIPPED = {
    name: json.loads((files("pfl_lightning.callbacks") / name).read_text())
    for name in ("results.schema.json", "personalized.schema.json")
}


def test_the_schemas_of_the_page_are_those_that_ship():
    text = PAGE.read_text()
    included = re.findall(r"^```\{literalinclude\} (\S+)$", text, flags=re.MULTILINE)
    downloads = re.findall(r"\{download\}`[^`<]*<(\S+)>`", text)
    for paths in (included, downloads):
        assert [json.loads((PAGE.parent / path).read_text()) for path in paths] == list(SHIPPED.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_key_is_explained(name):
    text = PAGE.read_text()
    for key in SHIPPED[name]["properties"]:
        assert f"`{key}`" in text, key


def test_the_schemas_agree_in_what_identifies_a_run():
    results, personalized = (schema["properties"] for schema in SHIPPED.values())
    for key in ("format", "method", "method_arguments", "data", "partition", "versions", "seed", "evaluated"):
        assert results[key] == personalized[key], key
    assert SHIPPED["results.schema.json"]["$defs"]["named"] == SHIPPED["personalized.schema.json"]["$defs"]["named"]


def test_the_schema_knows_every_setting_of_a_personalization():
    known = SHIPPED["personalized.schema.json"]["properties"]["personalization"]["properties"]
    assert set(known) == set(asdict(Personalization()))
    assert set(known["train"]["enum"]) == set(get_args(Trained))


def test_everything_in_the_files_of_a_personalization_is_explained(tmp_path):
    write_personalization(run(FedAvg, 1), Personalization(), tmp_path, 1)
    _, section = PAGE.read_text().split("\n## personalized.json\n")
    section, *_ = section.split("\n## ")
    content = json.loads((tmp_path / "personalized.json").read_text())
    with (tmp_path / "personalized.csv").open() as file:
        columns = next(csv.reader(file))
    for name in (*content, *content["personalization"], *content["participating"], *columns):
        assert f"`{name}`" in section, name
