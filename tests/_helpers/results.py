"""Files of results: what they must satisfy, and what two of them have in common."""

import json
from importlib.resources import files

import jsonschema

SCHEMAS = {
    name: json.loads((files("pfl_lightning.callbacks") / f"{name}.schema.json").read_text())
    for name in ("results", "personalized")
}


def valid(path):
    """The content of a file that satisfies its schema, one of those which ship with the package."""

    def refuse(name):
        raise AssertionError(f"{path} has {name}, which is no JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    schema = SCHEMAS["personalized" if path.name == "personalized.json" else "results"]
    jsonschema.validate(content, schema, jsonschema.Draft202012Validator)
    return content


def without_seconds(content):
    """What does not depend on how fast the machine is."""
    if isinstance(content, dict):
        return {key: without_seconds(entry) for key, entry in content.items() if not key.startswith("seconds")}
    return [without_seconds(entry) for entry in content] if isinstance(content, list) else content
