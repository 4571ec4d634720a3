"""Options of the command line that go to every run of a study: laid over configs, and refused where they do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.study.definition.options import Config, merge, option_of, short_path, with_option
from pfl_lightning.study.definition.study import Study
from pfl_lightning.study.definition.yaml_file import read_yaml, value_of

__all__ = ["SEED_OPTIONS", "apply_words", "check_words"]

_MISSING = object()

SEED_OPTIONS = ("seed_everything", "data.init_args.seed", "data.init_args.partition.init_args.seed")
"""Options that take the seed; those of the data where a config has them."""


def apply_words(config: Config, words: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A config with options of the command line laid over it; ``config`` names a file of them."""
    found = dict(config)
    for path, text in words:
        if path == "config":
            found = merge(found, read_yaml(Path(text), "--config"))
        else:
            found = with_option(found, path, value_of(text))
    return found


def check_words(study: Study, words: Sequence[tuple[str, str]]) -> None:
    """Refuse options that something else of the study sets, too.

    Args:
        study: The study.
        words: Further options of every run, as pairs of path and text.

    Raises:
        UsageError: An option of the command line is in the grid or searched, or takes the study's seeds, as one of
            the grid or of the search must not either.
    """
    searched = study.search.paths if study.search is not None else ()
    _refuse_varied(study, words, searched)
    _refuse_seeds(study, words, searched)


def _refuse_varied(study: Study, words: Sequence[tuple[str, str]], searched: Sequence[str]) -> None:
    for word, text in words:
        content = read_yaml(Path(text), "--config") if word == "config" else {}
        for what, paths in (("grid", tuple(study.grid)), ("search", searched)):
            for path in paths:
                if short_path(word) == short_path(path) or option_of(content, path, _MISSING) is not _MISSING:
                    said = f"--{word}" if word != "config" else f"{path} of --config {text}"
                    raise UsageError(f"{said} is an option of the study's {what}: change the study file instead")


def _refuse_seeds(study: Study, words: Sequence[tuple[str, str]], searched: Sequence[str]) -> None:
    """Refuse other values of options that take the study's seeds, which would win without a word."""
    taking = {short_path(path) for path in study.seed_options or SEED_OPTIONS}
    given = [(f"--{path}", path) for path, _ in words]
    given += [(f"{path} of the study's grid", path) for path in study.grid]
    given += [(f"{path} of the study's search", path) for path in searched]
    for said, path in given:
        if short_path(path) in taking:
            raise UsageError(
                f"{said} takes the seeds of the study, so that this would change nothing: give seeds: [...] in the "
                "study file, or leave the option out of its seed_options"
            )
