"""Files of TensorBoard's Embedding Projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.state.files import replace_file

__all__ = ["Embedding", "thumbnails", "write_embedding"]

LARGEST_IMAGE = 64  # pixels; a sprite of thousands of images stays below what browsers load
CONFIG = "projector_config.pbtxt"


@dataclass(frozen=True)
class Embedding:
    """Points with their metadata.

    Attributes:
        name: Name in the projector; may contain slashes.
        points: Points on the CPU, shape (n, d).
        columns: Names of the metadata columns.
        rows: Metadata of each point, one text per column.
        images: Image of each point from :func:`thumbnails`, shape (n, 3, H, W); ``None`` for none.
    """

    name: str
    points: Tensor
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    images: Tensor | None = None


def write_embedding(folder: Path, embedding: Embedding) -> None:
    """Write an embedding below a log folder and add it to the projector's list; one of the same name is replaced."""
    from google.protobuf import text_format
    from PIL import Image
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    own = Path("projector") / embedding.name
    with replace_file(folder / own / "tensors.tsv") as temporary:
        np.savetxt(temporary, embedding.points.numpy(), fmt="%.5g", delimiter="\t")
    lines = ["\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row) for row in embedding.rows]
    header = ["\t".join(embedding.columns)] if len(embedding.columns) > 1 else []  # the format has none for one column
    with replace_file(folder / own / "metadata.tsv") as temporary:
        temporary.write_text("\n".join([*header, *lines]) + "\n", encoding="utf-8")
    config, path = ProjectorConfig(), folder / CONFIG
    if path.exists():
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    others = [entry for entry in config.embeddings if entry.tensor_name != embedding.name]
    del config.embeddings[:]
    config.embeddings.extend(others)
    entry = config.embeddings.add(
        tensor_name=embedding.name,
        tensor_path=(own / "tensors.tsv").as_posix(),
        metadata_path=(own / "metadata.tsv").as_posix(),
        tensor_shape=list(embedding.points.shape),
    )
    if embedding.images is not None:
        tiles, side = _sprite(embedding.images)
        with replace_file(folder / own / "sprite.png") as temporary:
            Image.fromarray(tiles).save(temporary, "png")
        entry.sprite.image_path = (own / "sprite.png").as_posix()
        entry.sprite.single_image_dim.extend(side)
    with replace_file(path) as temporary:
        temporary.write_text(text_format.MessageToString(config), encoding="utf-8")


def thumbnails(inputs: Tensor) -> Tensor | None:
    """Small images of inputs, each scaled from black to white.

    Args:
        inputs: Any floats, shape (n, 1 or 3, H, W) for images.

    Returns:
        Unsigned bytes on the CPU, shape (n, 3, H', W') with sides of at most 64 pixels; ``None`` if the inputs are no
        images.

    Example:
        >>> images = thumbnails(torch.randn(5, 1, 128, 64))
        >>> images.shape, images.dtype
        (torch.Size([5, 3, 64, 32]), torch.uint8)
        >>> thumbnails(torch.randn(5, 30)) is None
        True
    """
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    height, width = inputs.shape[-2:]
    factor = min(1.0, LARGEST_IMAGE / max(height, width))
    values = inputs.float()
    if factor < 1:
        values = F.interpolate(values, (max(1, int(height * factor)), max(1, int(width * factor))), mode="area")
    flat = values.flatten(start_dim=1)
    low, high = (end[:, None, None, None] for end in (flat.amin(dim=1), flat.amax(dim=1)))
    scaled = (255 * (values - low) / (high - low).clamp(min=1e-12)).round().to("cpu", torch.uint8)
    return scaled.expand(-1, 3, -1, -1)


def _sprite(images: Tensor) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Image of all images on a square grid, row by row, shape (H', W', 3); and width and height of one of them."""
    side = int(np.ceil(np.sqrt(len(images))))
    height, width = images.shape[-2:]
    grid = torch.zeros(side * side, 3, height, width, dtype=torch.uint8)
    grid[: len(images)] = images
    tiles = grid.reshape(side, side, 3, height, width).permute(0, 3, 1, 4, 2).reshape(side * height, side * width, 3)
    return tiles.numpy(), (width, height)
