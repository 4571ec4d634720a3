"""Recorder of scalars, figures and text: to the loggers that accept them, otherwise to files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.callbacks.inspection.drawing.charts import Chart, layout
from pfl_lightning.callbacks.inspection.drawing.figures import new_figure, render
from pfl_lightning.callbacks.inspection.drawing.loggers import (
    end_session,
    start_session,
    tensorboard_writer,
    write_histogram,
    write_image,
    write_text,
)
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Recorder"]


class Recorder:
    """Output to every logger of the Trainer that accepts it; what no logger accepts is saved in a folder.

    Args:
        trainer: The Trainer of the federation; with ``fast_dev_run`` nothing is recorded.
        dirpath: Folder of the files; ``None`` is ``inspection`` in the run's folder.

    Raises:
        ConfigurationError: If the folder cannot be created.
    """

    def __init__(self, trainer: L.Trainer, dirpath: str | None = None) -> None:
        self.loggers: list[Logger] = list(trainer.loggers)
        self.silent = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        self.folder = Path(dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "inspection")
        self._said: set[str] = set()
        if dirpath is not None and not self.silent:
            self._check_folder()

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Log numbers against the round."""
        if values and not self.silent:
            for logger in self.loggers:
                logger.log_metrics(dict(values), step=round)

    def figure(self, tag: str, figure: Figure, round: int) -> None:
        """Log a figure, or save it as ``<tag>-round-<round>.png``."""
        if self.silent:
            return
        image = render(figure)
        taken = [write_image(logger, tag, image, round) for logger in self.loggers]
        if not any(taken):
            from PIL import Image

            with self._file(f"{tag}-round-{round + 1:04d}.png", "pictures") as file:
                Image.fromarray(image).save(file, "png")

    def histogram(self, tag: str, values: Sequence[float], edges: NDArray[np.float64], round: int) -> None:
        """Log a histogram; as a figure if no logger accepts histograms."""
        finite = np.asarray(values, dtype=np.float64)
        finite = finite[np.isfinite(finite)]
        if self.silent or not len(finite):
            return
        taken = [write_histogram(logger, tag, finite, edges, round) for logger in self.loggers]
        if not any(taken):
            figure = new_figure(5, 3)
            axes = figure.add_subplot()
            axes.hist(finite, bins=edges.tolist(), color="#2c7fb8")
            axes.set(title=f"{tag}, round {round + 1}", ylabel="clients")
            self.figure(tag, figure, round)

    def text(self, tag: str, text: str, round: int) -> None:
        """Log text, or save it as ``<tag>.txt``."""
        if not self.silent:
            taken = [write_text(logger, tag, text, round) for logger in self.loggers]
            if not any(taken):
                with self._file(f"{tag}.txt", "texts") as file:
                    file.write_text(text, encoding="utf-8")

    def hyper_parameters(self, values: Mapping[str, bool | int | float | str], metrics: Sequence[str]) -> None:
        """Log the hyper-parameters of the run; TensorBoard shows the last values of the metrics with them."""
        for logger in [] if self.silent else self.loggers:
            if not start_session(logger, values, metrics):
                logger.log_hyperparams(dict(values))

    def finished(self) -> None:
        """Mark the run as finished in TensorBoard."""
        for logger in [] if self.silent else self.loggers:
            end_session(logger)

    def layout(self, charts: Sequence[Chart]) -> None:
        """Group scalars into charts in TensorBoard; other loggers do not support it."""
        for writer in filter(None, map(tensorboard_writer, [] if self.silent else self.loggers)):
            writer.add_custom_scalars(layout(charts))

    def embedding(
        self,
        tag: str,
        points: Tensor,
        rows: Sequence[Sequence[str]],
        columns: Sequence[str],
        images: Tensor | None,
        round: int,
    ) -> None:
        """Add points to TensorBoard's Embedding Projector; a message is logged once if no logger has it.

        Args:
            tag: Name in the projector.
            points: The points, shape (n, d).
            rows: Texts of each point, one per column.
            columns: Names of these texts.
            images: Square images of the points, shape (n, 3, S, S) in [0, 1]; ``None`` for none.
            round: The round, with which the name ends.
        """
        writers = [] if self.silent else [*filter(None, map(tensorboard_writer, self.loggers))]
        for writer in writers:
            writer.add_embedding(points, [*map(list, rows)], images, round, tag, list(columns))
        if not writers and not self.silent:
            what = "the Embedding Projector"
            self._say(what, f"{what} is skipped: it needs a TensorBoardLogger, and the run has none")

    def _file(self, name: str, what: str) -> AbstractContextManager[Path]:
        self._say(what, f"no logger of this run accepts {what}: they are saved in {self.folder}")
        return replace_file(self.folder / name)

    def _check_folder(self) -> None:
        """Refuse a folder that cannot be created before the first round; it is created with its first file."""
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            reason = "cannot be written to" if there.is_dir() else "is not a folder"
            raise ConfigurationError(
                f"the folder {self.folder} for inspection figures cannot be created, since {there} {reason}: "
                "give another dirpath"
            )

    def _say(self, key: str, line: str) -> None:
        if key not in self._said:
            self._said.add(key)
            rank_zero_info(line)
