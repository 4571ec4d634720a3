"""Files of results: what they must satisfy, and what two of them have in common."""

import json
import runpy
from importlib.resources import files
from pathlib import Path

import jsonschema

SCHEMAS = {
    name: json.loads((files("pfl_lightning.callbacks") / f"{name}.schema.json").read_text())
    for name in ("results", "personalized")
}


KEEP_RESULTS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "keep_results.py"))
kept_runs, restore = KEEP_RESULTS["kept_runs"], KEEP_RESULTS["restore"]


def valid(path):
    """The content of a file that satisfies its schema, one of those which ship with the package."""

    def refuse(name):
        raise AssertionError(f"{path} has {name}, which is no JSON")

    return valid_content(json.loads(path.read_text(), parse_constant=refuse), path.stem)


def valid_content(content, name="results"):
    """The content of a file of results that satisfies its schema; ``name`` is the file's, without its ending."""
    schema = SCHEMAS["personalized" if name == "personalized" else "results"]
    jsonschema.validate(content, schema, jsonschema.Draft202012Validator)
    return content


def without_seconds(content):
    """What does not depend on how fast the machine is."""
    if isinstance(content, dict):
        return {key: without_seconds(entry) for key, entry in content.items() if not key.startswith("seconds")}
    return [without_seconds(entry) for entry in content] if isinstance(content, list) else content
