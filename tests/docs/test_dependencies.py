"""The list of packages and allowed dependencies in CONTRIBUTING.md, compared with the imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pfl_lightning"
BASES = {"messages", "phases", "data", "fit", "metrics", "class_metrics", "seeding", "checks", "errors"}
BASES |= {"names", "notices", "options", "older_package", "lightning_private"}
TOP = {"callbacks", "cli", "datamodules", "drop_in"}

# Packages to what they may import of the package when they are imported themselves. What is imported for type checkers
# alone, or inside a function, does not count.
ALLOWED = {
    "functional": set(),
    "encoders": {"names", "checks", "errors"},
    "datamodules": {
        "data",
        "seeding",
        "checks",
        "errors",
        "names",
        "notices",
        "options",
        "older_package",
        "lightning_private",
        "state",
    },
    **{module: BASES | {"functional"} for module in BASES},
    "devices": BASES,
    "simulation": BASES | {"devices"},
    "server": BASES | {"functional", "state", "learner"},
    "server_optimizers": {"checks"},
    "client": BASES | {"functional", "state", "server"},
    "privacy": BASES | {"functional", "client", "server"},
    "robust": BASES | {"functional", "server"},
    "learner": BASES | {"functional", "state"},
    "self_supervised": BASES | {"functional", "state", "client", "server"},
    "methods": BASES
    | {"functional", "state", "client", "server", "learner", "self_supervised", "encoders", "server_optimizers"},
    "engines": BASES | {"functional", "state", "client", "server"},
}
# The others, and what they may not import.
FORBIDDEN = {
    "state": {"engines", "methods", "round", "federation", *TOP},
    "round": {"federation", "methods", *TOP},
    "federation": {"methods", *TOP},
    "callbacks": {"cli", "methods"},
    "drop_in": {"cli", "methods"},
    "runs": {"federation", "methods", "engines", "study", "report", *TOP},
    "report": {"federation", "methods", "engines", "study", *TOP},
    "jobs": {"federation", "methods", "engines", "study", "report", "callbacks", "datamodules", "drop_in"},
    "study": {"methods", "engines", "datamodules", "drop_in"},
    "cli": {"study"},
}


def at_import(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports of a module outside of functions and ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef) and not (
            isinstance(node, ast.If) and "TYPE_CHECK" in ast.dump(node.test)
        ):
            yield from at_import(node)


def imported(name: str) -> dict[str, str]:
    """Packages that one of them imports, with a file that does."""
    place = PACKAGE / name
    found = {}
    for file in [place.with_suffix(".py")] if not place.is_dir() else sorted(place.glob("**/*.py")):
        for node in at_import(ast.parse(file.read_text())):
            parts = (node.module or "").split(".")
            if parts[0] == "pfl_lightning":
                targets = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
                found |= {target: str(file.relative_to(PACKAGE)) for target in targets if target != name}
    return found


def test_the_walk_sees_imports():
    assert {"server", "state"} <= imported("client").keys()
    assert "data" in imported("datamodules")


@pytest.mark.parametrize(
    "name", [name for name in sorted(ALLOWED) if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()]
)
def test_what_a_package_imports(name):
    surplus = {target: file for target, file in imported(name).items() if target not in ALLOWED[name] | {"__version__"}}
    assert not surplus, f"{name} may not import {surplus}; see the list in CONTRIBUTING.md"


@pytest.mark.parametrize(
    "name", [name for name in sorted(FORBIDDEN) if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()]
)
def test_what_a_package_does_not_import(name):
    surplus = {target: file for target, file in imported(name).items() if target in FORBIDDEN[name]}
    assert not surplus, f"{name} may not import {surplus}; see the list in CONTRIBUTING.md"


# ---------------------------------------------------------------------- circles, imports in functions counted


def imports_of(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """All imports of a module but those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and "TYPE_CHECK" in ast.dump(node.test)):
            yield from imports_of(node)


def module_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Modules to those that they import, by the sources of all."""
    graph = {}
    for name, source in files.items():
        targets = set()
        for node in imports_of(ast.parse(source)):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                targets.add(inner if inner in files else node.module)
        graph[name] = {target for target in targets if target in files and target != name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which imports, through others, all of them."""
    reached = {name: reachable(graph, name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, next_ones = set(), list(graph[start])
    while next_ones:
        name = next_ones.pop()
        if name not in found:
            found.add(name)
            next_ones += graph[name]
    return found


def sources() -> dict[str, str]:
    names = {}
    for file in PACKAGE.glob("**/*.py"):
        parts = ["pfl_lightning", *file.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    for linked in ("callbacks", "datamodules"):
        for file in (ROOT / linked).glob("**/*.py"):
            parts = ["pfl_lightning", linked, *file.relative_to(ROOT / linked).with_suffix("").parts]
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return names


def test_a_circle_through_a_function_is_seen():
    files = {
        "a": "from b import x",
        "b": "def f():\n    from c import y",
        "c": "from a import z",
        "d": "if TYPE_CHECKING:\n    from a import z\nfrom b import x",
    }
    assert circles(module_graph(files)) == [{"a", "b", "c"}]


def test_modules_import_each_other_in_no_circle():
    assert circles(module_graph(sources())) == []
