"""Every method has a page in docs/methods, and what the pages name exists."""

import re
from pathlib import Path

import pytest
import yaml

from pfl_lightning.methods import ADAPTER_METHODS
from pfl_lightning.methods import METHODS as PLAIN_METHODS

METHODS = (*PLAIN_METHODS, *ADAPTER_METHODS)
ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
CONFIG = re.compile(r"configs/\w+\.yaml")
TEST = re.compile(r"tests/[\w/]+\.py")
FORM = ["Hyper-parameters", "Departures from the paper", "Cost", "When to use it", "Run it", "Results", "Tests"]
"""Sections of a page, in this order; results may be missing."""


def flat(text):
    """The text on one line: titles may be broken over two."""
    return " ".join(text.split())


def page_of(method):
    """The page that names the class first."""
    pages = [
        page for page in PAGES.glob("*.md") if f"\n\n`pfl_lightning.methods.{method.__name__}`" in page.read_text()
    ]
    assert len(pages) == 1, f"docs/methods has {len(pages)} pages that begin with {method.__name__}, expected one"
    return pages[0]


def method_of(config):
    """Name of the class that a config trains."""
    method = yaml.safe_load((ROOT / config).read_text())["model"]["method"]
    path = method if isinstance(method, str) else method["class_path"]
    return path.rpartition(".")[2]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_page_names_its_paper_and_configs(method):
    text = page_of(method).read_text()
    if method.citation is not None:
        assert method.citation.title in flat(text)
        assert f"{method.citation.venue} {method.citation.year}" in flat(text)
    mine = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    mine = {config for config in mine if method_of(config) == method.__name__}
    assert mine <= set(CONFIG.findall(text)), "the page leaves out a config"
    assert mine or f"There is no config for {method.__name__}" in text


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_page_says_what_the_method_costs(method):
    """Bytes, what is kept, and how often samples pass through networks, in one section."""
    [said] = re.findall(r"\n## Cost\n(.*?)(?=\n## )", page_of(method).read_text(), re.DOTALL)
    for subject in ("byte|each way|travel", "keep|kept|store|memory|hold|state", r"pass(es)?\b"):
        assert re.search(subject, flat(said)), subject


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_pages_have_one_form(method):
    sections = [found for found in re.findall(r"^## (.+)$", page_of(method).read_text(), re.MULTILINE) if found in FORM]
    assert sections == [section for section in FORM if section in sections or section != "Results"]


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    for name in {*CONFIG.findall(text), *TEST.findall(text)}:
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_the_table_has_every_method():
    index = (PAGES / "index.md").read_text()
    for method in METHODS:
        assert f"]({page_of(method).name}) | `{method.__name__}` |" in index
        assert index.count(f"| `{method.__name__}` |") == 1, f"{method.__name__} has several rows"


@pytest.mark.parametrize("folder", ["decisions", "methods"])
def test_links_between_pages_lead_somewhere(folder):
    for page in (ROOT / "docs" / folder).glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"


def test_decisions_are_numbered_once():
    numbers = [page.name[:4] for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md")]
    assert len(numbers) == len(set(numbers))
