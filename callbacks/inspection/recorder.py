"""Recorder of scalars, figures and text: to the loggers that accept them, otherwise to files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.callbacks.inspection.figures import new_figure, render
from pfl_lightning.notices import shown_before
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Recorder:
    """Output to every logger of the Trainer that accepts it; what no logger accepts is saved in a folder.

    Histograms, text, charts and the Embedding Projector are TensorBoard's alone; images go to other loggers, too.

    Args:
        trainer: The Trainer of the federation; with ``fast_dev_run`` nothing is recorded.
        dirpath: Folder of the files; ``None`` is ``inspection`` in the run's folder.
    """

    def __init__(self, trainer: L.Trainer, dirpath: str | None = None) -> None:
        self.silent = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        self.loggers: list[Logger] = [] if self.silent else list(trainer.loggers)
        self.folder = Path(dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "inspection")

    def _boards(self) -> Iterator[Any]:
        """Yield the ``SummaryWriter`` of each TensorBoardLogger."""
        yield from (logger.experiment for logger in self.loggers if isinstance(logger, TensorBoardLogger))

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Log numbers against the round."""
        for logger in self.loggers if values else ():
            logger.log_metrics(dict(values), step=round)

    def figure(self, tag: str, figure: Figure, round: int) -> None:
        """Log a figure, or save it as ``<tag>-round-<round>.png``."""
        if self.silent:
            return
        image = render(figure)
        taken = [_write_image(logger, tag, image, round) for logger in self.loggers]
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
        boards = list(self._boards())
        for writer in boards:
            writer.add_histogram(tag, finite, round, bins=edges)
        if not boards:
            figure = new_figure(5, 3)
            axes = figure.add_subplot()
            axes.hist(finite, bins=edges.tolist(), color="#2c7fb8")
            axes.set(title=f"{tag}, round {round + 1}", ylabel="clients")
            self.figure(tag, figure, round)

    def text(self, tag: str, text: str, round: int) -> None:
        """Log text verbatim, or save it as ``<tag>.txt``."""
        boards = list(self._boards())
        for writer in boards:
            writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), round)  # Markdown's code block
        if not boards and not self.silent:
            with self._file(f"{tag}.txt", "texts") as file:
                file.write_text(text, encoding="utf-8")

    def hyper_parameters(self, values: Mapping[str, bool | int | float | str], metrics: Sequence[str]) -> None:
        """Log the hyper-parameters of the run; TensorBoard shows the last values of the metrics with them."""
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                from torch.utils.tensorboard.summary import hparams

                for summary in hparams(dict(values), dict.fromkeys(metrics, 0.0)):
                    logger.experiment._get_file_writer().add_summary(summary)
            else:
                logger.log_hyperparams(dict(values))

    def layout(self, charts: Mapping[str, Mapping[str, list[Any]]]) -> None:
        """Group scalars into charts in TensorBoard; other loggers do not support it."""
        for writer in self._boards():
            writer.add_custom_scalars(charts)

    def embedding(self, tag: str, points: Tensor, texts: Mapping[str, Sequence[str]], round: int) -> None:
        """Add points to TensorBoard's Embedding Projector; a message is logged once if no logger has it.

        Args:
            tag: Name in the projector.
            points: The points, shape (n, d).
            texts: Texts of each point, by the names of their columns.
            round: The round, with which the name ends.
        """
        boards = list(self._boards())
        for writer in boards:
            rows = [list(row) for row in zip(*texts.values(), strict=True)]
            writer.add_embedding(points, rows, None, round, tag, list(texts))
        if not boards and not self.silent:
            _log_once(self.folder, "the Embedding Projector is skipped: it needs a TensorBoardLogger")

    def _file(self, name: str, what: str) -> AbstractContextManager[Path]:
        _log_once(self.folder, f"no logger of this run accepts {what}: they are saved in {self.folder}")
        return replace_file(self.folder / name)


def _log_once(folder: Path, line: str) -> None:
    """Say something of the figures of a folder, which several callbacks write, once in a fit."""
    if not shown_before(folder, line):
        rank_zero_info(line)


def _write_image(logger: Logger, tag: str, image: NDArray[np.uint8], round: int) -> bool:
    """Log an image of shape (H, W, 3), unsigned bytes; true if the logger accepts images.

    TensorBoard accepts it by ``add_image``, Weights & Biases by ``log_image``, MLflow by its client's ``log_image``.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(tag, image, round, dataformats="HWC")
        return True
    if hasattr(logger, "log_image"):  # WandbLogger
        logger.log_image(key=tag, images=[image], step=round)
        return True
    client: Any = getattr(logger, "experiment", None) if hasattr(logger, "run_id") else None
    if not hasattr(client, "log_image"):
        return False
    client.log_image(logger.run_id, image, artifact_file=f"{tag}/round-{round + 1:04d}.png")  # type: ignore[attr-defined]
    return True
