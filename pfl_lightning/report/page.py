"""One HTML page with everything of a report, which opens without a network."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from pfl_lightning.report.formats import html_table
from pfl_lightning.report.rows import MeasuredRow, blocks
from pfl_lightning.report.tables import TextTable, texts
from pfl_lightning.runs.config import show
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
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; } pre { background: #2a2a2a; } .note { color: #bbb; }
  th, td { border-color: #444; } img { background: white; }
}
"""


def html_page(
    title: str,
    notes: Sequence[str],
    tables: Sequence[TextTable],
    rows: Sequence[MeasuredRow],
    figure: Figure | None,
) -> str:
    """The page; nothing of it is loaded from elsewhere.

    Args:
        title: Its title.
        notes: Texts below the tables.
        tables: All tables.
        rows: The rows, for the settings of their runs.
        figure: The curves.
    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        *map(html_table, tables),
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
    ]
    if figure is not None:
        parts.append(f'<h2>Curves</h2>\n<img alt="Learning curves" src="data:image/svg+xml;base64,{_svg(figure)}">')
    parts.append("<h2>Settings</h2>")
    for setting, some in blocks(rows).items():
        parts.append(f"<h3>{escape(setting)}</h3>" if setting else "")
        parts += [_options(some), *map(_runs, some)]
    return "\n".join([*filter(None, parts), "</body>\n</html>\n"])


def _svg(figure: Figure) -> str:
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pfl_lightning"}):  # the same page of the same results
        figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()


def _options(rows: Sequence[MeasuredRow]) -> str:
    """Options in which the rows of a block differ, and those that all share."""
    found = [row for row in rows if row.runs]
    options = [row.runs[0].options for row in found]
    lines = [
        [path, *(show(one[path]) if path in one else "" for one in options)]
        for path in dict.fromkeys(path for one in options for path in one)
    ]
    apart = [line for line in lines if len({*line[1:]}) > 1]
    common = "\n".join(f"{line[0]}: {line[1]}" for line in lines if line not in apart)
    table = texts("What differs", ("option", *(row.label for row in found)), apart)
    return (html_table(table) if apart else "") + (_details("What all share", _pre(common)) if common else "")


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _runs(row: MeasuredRow) -> str:
    """The runs of a row: folders, seeds, versions and the first one's config."""
    if not row.runs:
        return ""
    headings = ("folder", "seed", "rounds", "data", "partition", "versions")
    table = texts("", headings, map(_facts, row.runs))
    number = f"{len(row.runs)} run{'s' if len(row.runs) > 1 else ''}"
    return _details(f"{row.label}: {number}", html_table(table) + _config(row.runs[0]))


def _facts(run: FinishedRun) -> list[str]:
    sources = [" ".join(filter(None, (one.name, one.fingerprint[:19]))) or "-" for one in (run.data, run.partition)]
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "-"
    return [str(run.path), str(run.seed), str(run.rounds), *sources, versions]


def _config(run: FinishedRun) -> str:
    if not run.config:
        return ""
    import yaml

    text = yaml.safe_dump(json.loads(json.dumps(run.config, default=str)), sort_keys=False)
    return _details(f"config of {run.path}", _pre(text))
