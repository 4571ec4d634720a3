"""Output of images, histograms and text to each kind of logger; none of them has to be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from numpy.typing import NDArray

__all__ = [
    "end_session",
    "start_session",
    "tensorboard_writer",
    "write_histogram",
    "write_image",
    "write_text",
]

Image = NDArray[np.uint8]


class SummaryWriter(Protocol):
    """Interface of ``torch.utils.tensorboard.SummaryWriter`` that is used here."""

    def add_image(self, tag: str, img_tensor: Any, global_step: int, *, dataformats: str) -> None: ...

    def add_histogram(self, tag: str, values: Any, global_step: int, bins: Any) -> None: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...

    def add_embedding(
        self, mat: Any, metadata: Any, label_img: Any, global_step: int, tag: str, metadata_header: list[str]
    ) -> None: ...

    def add_custom_scalars(self, layout: Any) -> None: ...

    def _get_file_writer(self) -> Any: ...


def tensorboard_writer(logger: Logger) -> SummaryWriter | None:
    """Writer of a TensorBoardLogger; ``None`` for another logger."""
    return cast(SummaryWriter, logger.experiment) if isinstance(logger, TensorBoardLogger) else None


def write_image(logger: Logger, tag: str, image: Image, round: int) -> bool:
    """Log an image of shape (H, W, 3), unsigned bytes.

    TensorBoard accepts it by ``add_image``, Weights & Biases by ``log_image``, MLflow by its client's ``log_image``.

    Returns:
        True if the logger accepts images.
    """
    writer = tensorboard_writer(logger)
    if writer is not None:
        writer.add_image(tag, image, round, dataformats="HWC")
        return True
    if hasattr(logger, "log_image"):  # WandbLogger
        logger.log_image(key=tag, images=[image], step=round)
        return True
    client: Any = getattr(logger, "experiment", None) if hasattr(logger, "run_id") else None
    if not hasattr(client, "log_image"):
        return False
    client.log_image(logger.run_id, image, artifact_file=f"{tag}/round-{round + 1:04d}.png")  # type: ignore[attr-defined]
    return True


def write_histogram(logger: Logger, tag: str, values: NDArray[np.float64], edges: NDArray[np.float64], r: int) -> bool:
    """Log a histogram.

    Args:
        logger: The logger.
        tag: Name of the histogram.
        values: The values, shape (n,).
        edges: Edges of the bins, ascending.
        r: The round.

    Returns:
        True if the logger accepts histograms; only TensorBoard does.
    """
    writer = tensorboard_writer(logger)
    if writer is None:
        return False
    writer.add_histogram(tag, values, r, bins=edges)
    return True


def write_text(logger: Logger, tag: str, text: str, round: int) -> bool:
    """Log text verbatim.

    Returns:
        True if the logger accepts text; only TensorBoard does.
    """
    writer = tensorboard_writer(logger)
    if writer is None:
        return False
    writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), round)  # Markdown's code block
    return True


def start_session(logger: Logger, values: Mapping[str, bool | int | float | str], metrics: Sequence[str]) -> bool:
    """Log the hyper-parameters of a run, and the scalars to show with them, for TensorBoard's HPARAMS tab.

    Returns:
        True if the logger has such a tab; only TensorBoard does.
    """
    writer = tensorboard_writer(logger)
    if writer is None:
        return False
    from torch.utils.tensorboard.summary import hparams

    experiment, start, _ = hparams(dict(values), dict.fromkeys(metrics, 0.0))
    writer._get_file_writer().add_summary(experiment)
    writer._get_file_writer().add_summary(start)
    return True


def end_session(logger: Logger) -> None:
    """Mark the run as finished in TensorBoard's HPARAMS tab."""
    writer = tensorboard_writer(logger)
    if writer is not None:
        from torch.utils.tensorboard.summary import hparams

        writer._get_file_writer().add_summary(hparams({}, {})[2])
