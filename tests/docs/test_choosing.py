"""docs/choosing.md names methods that exist, with the figures that were measured."""

import re
from pathlib import Path

import pytest

from pfl_lightning.cli.methods import FILTERS, method_rows
from pfl_lightning.methods import ADAPTER_METHODS, METHODS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "choosing.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in TEXT.split("\n## ")[1:])
ROWS = re.findall(r"^\| \[`(\w+)`\]\(methods/(\w+)\.md\) \| ([\d.]+) \| ([\d.]+) \| .* \|$", TEXT, re.MULTILINE)
KNOWN = {row.name: row for row in method_rows()}


def rows_of(heading):
    return [name for name, *_ in ROWS if f"\n| [`{name}`](" in SECTIONS[heading]]


def test_every_method_that_is_named_exists():
    names = {method.__name__ for method in (*METHODS, *ADAPTER_METHODS)}
    ours = re.compile(r"`([A-Z][A-Za-z]+)`")
    assert set(ours.findall(TEXT)) <= {*names, "FromDatasets", "STL10"}
    assert names <= set(ours.findall(TEXT)), "the page leaves out a method"
    for name, page in re.findall(r"\[`(\w+)`\]\(methods/(\w+)\.md\)", TEXT):
        assert f"`pfl_lightning.methods.{name}`" in (DOCS / "methods" / f"{page}.md").read_text()


def test_costs_are_those_that_were_measured():
    assert len(ROWS) == TEXT.count("\n| [`")
    fedavg = KNOWN["FedAvg"].costs
    for name, _, *given in ROWS:
        costs = KNOWN[name].costs
        both = (costs.down_bytes + costs.up_bytes) / (fedavg.down_bytes + fedavg.up_bytes)
        assert given == [f"{both:.2f}", f"{costs.work:.2f}"], f"{name}: write these two, of costs.json"


@pytest.mark.parametrize(
    ("heading", "option"), [("Clients need different encoders", "--heterogeneous"), ("Clients come later", "--novel")]
)
def test_methods_do_what_their_section_needs(heading, option):
    """As `pfl methods` says with this filter."""
    assert rows_of(heading)
    assert all(FILTERS[option](KNOWN[name]) for name in rows_of(heading))


def test_any_module_is_trained_by_those_that_are_listed():
    text = SECTIONS["Your model is any LightningModule"].partition(", and with low-rank adapters")[0]
    assert set(re.findall(r"`(\w+)`", text)) == {name for name, row in KNOWN.items() if row.modules == "yes"}


def test_what_clients_with_little_keep_and_send():
    little, dear = (part for part in SECTIONS["Clients have little compute or memory"].split("These are expensive"))
    cheap = [KNOWN[name].costs for name in re.findall(r"\n\| \[`(\w+)`", little)]
    assert all(costs.work == 1 and costs.client_bytes <= KNOWN["FedPer"].costs.client_bytes for costs in cheap)
    assert all(KNOWN[name].costs.work > 3 for name in re.findall(r"\n\| \[`(\w+)`", dear))
    sending = SECTIONS["Bytes matter"].partition("(`DCPFL`")[0].partition("too:")[2]
    for name in re.findall(r"`(\w+)`", sending):
        costs = KNOWN[name].costs
        assert 15 * (costs.down_bytes + costs.up_bytes) <= 2 * KNOWN["FedAvg"].costs.down_bytes


def test_accuracies_are_of_the_results():
    without_costs = re.sub(r"\| [\d.]+ \| [\d.]+ \|", "", TEXT)
    results = "".join(page.read_text() for page in sorted((DOCS / "results").glob("*.md")))
    figures = re.findall(r"\b\d\d\.\d\d\b", without_costs)
    assert len(figures) > 20
    assert all(figure in results for figure in figures)
