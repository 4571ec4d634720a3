"""Sphinx extension: writes the pages that are generated from the code before the site is built."""

from __future__ import annotations

from pathlib import Path

from hyperparameters import hyperparameters_page
from reference import reference_pages
from sphinx.application import Sphinx

__all__ = ["setup", "write_pages"]


def write_pages(folder: Path) -> None:
    """Write the generated pages below a folder; a page whose text is as before keeps its file.

    Args:
        folder: Folder of the site's sources.
    """
    pages = {"hyperparameters.md": hyperparameters_page(), **reference_pages()}
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    generated = {folder / name for name in pages}
    for path in (folder / "reference").rglob("*.md"):
        if path not in generated:
            path.unlink()  # of a name that is gone


def _write(app: Sphinx) -> None:
    write_pages(Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
