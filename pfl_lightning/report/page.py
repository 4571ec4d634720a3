"""One HTML page with everything of a report, which opens without a network."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from pfl_lightning.report.rows import MeasuredRow
from pfl_lightning.report.tables import TextTable, texts
from pfl_lightning.runs.results import FinishedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 95rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; }
caption { text-align: left; font-weight: bold; padding: .3rem 0; white-space: nowrap; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }
img { max-width: 100%; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; }
.note { max-width: 50rem; color: #444; }
"""


def html_page(
    title: str,
    notes: Sequence[str],
    tables: Sequence[TextTable],
    rows: Sequence[MeasuredRow],
    figures: Mapping[str, Figure],
) -> str:
    """The page; nothing of it is loaded from elsewhere.

    Args:
        title: Its title.
        notes: Texts below the tables.
        tables: All tables.
        rows: The rows, for the settings of their runs.
        figures: Pictures, by their headings.
    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        *map(html_table, tables),
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
    ]
    for heading, figure in figures.items():
        import matplotlib

        file = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "pfl_lightning"}):  # the same page of the same results
            figure.savefig(file, format="svg", metadata={"Date": None})
        picture = base64.b64encode(file.getvalue()).decode()
        parts.append(f'<h2>{heading}</h2>\n<img alt="{heading}" src="data:image/svg+xml;base64,{picture}">')
    parts += ["<h2>Settings</h2>", *(_runs(row) for row in rows if row.runs), "</body>\n</html>\n"]
    return "\n".join(parts)


def _runs(row: MeasuredRow) -> str:
    """The runs of a row: folders, seeds, versions and the first one's config, or what is known of it."""
    first = row.runs[0]
    config = json.dumps(first.config or first.options, indent=2, default=str)
    table = texts(
        f"{len(row.runs)} runs", ("folder", "seed", "rounds", "data", "partition", "versions"), map(_facts, row.runs)
    )
    parts = f"{html_table(table)}<p>Config of {escape(str(first.path))}:</p><pre>{escape(config)}</pre>"
    return f"<details><summary>{escape(row.name)}</summary>{parts}</details>"


def _facts(run: FinishedRun) -> list[str]:
    sources = [" ".join(filter(None, (one.name, one.fingerprint[:19]))) or "-" for one in (run.data, run.partition)]
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "-"
    return [str(run.path), str(run.seed), str(run.rounds), *sources, versions]


def html_table(table: TextTable) -> str:
    """The table as an element of a page."""
    title = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    marked = {True: "<td><b>{}</b></td>", False: "<td>{}</td>"}
    rows = ("".join(marked[cell.best].format(escape(cell.text)) for cell in line) for line in table.lines)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table>{title}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n"
