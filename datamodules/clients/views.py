"""How a client sees its samples: rotated, or with other class numbers. The samples themselves stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.parts import ClientSplit
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.datamodules.counting import Ints


@dataclass(frozen=True)
class ClientView:
    """What one client sees in place of the stored samples, in its training, validation and test parts alike.

    Attributes:
        rotation: Degrees by which every image is turned counter-clockwise; kept in [0, 360).
        label_map: A permutation of the classes: a sample of class c counts as ``label_map[c]``. None (and a
            permutation that moves nothing becomes None) for the classes as they are.
    """

    rotation: float = 0.0
    label_map: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check both and bring them into the one form that equal views share."""
        if not math.isfinite(self.rotation):
            raise ValueError(f"a rotation must be a finite number of degrees, got {self.rotation}")
        object.__setattr__(self, "rotation", float(self.rotation) % 360.0)
        if self.label_map is not None:
            given = tuple(int(label) for label in self.label_map)
            if sorted(given) != list(range(len(given))):
                raise ValueError(
                    f"a label map must hold every class from 0 to {len(given) - 1} once, got {list(self.label_map)}"
                )
            object.__setattr__(self, "label_map", None if given == tuple(range(len(given))) else given)

    @property
    def is_identity(self) -> bool:
        """Whether the client sees the samples as they are stored."""
        return self.rotation == 0.0 and self.label_map is None

    def inputs(self, stored: Tensor) -> Tensor:
        """What the client sees of stored inputs, shape (n, ...); a rotation needs images, shape (n, C, H, W)."""
        return rotate_images(stored, self.rotation) if self.rotation else stored

    def targets(self, stored: Tensor) -> Tensor:
        """The classes that the client sees for stored ones, shape (n,), int64."""
        return stored if self.label_map is None else torch.tensor(self.label_map, device=stored.device)[stored]

    def counts(self, stored: Ints) -> Ints:
        """Samples of each class as the client sees them, for counts of the stored classes, shape (C,)."""
        if self.label_map is None:
            return stored
        seen = np.empty_like(stored)
        seen[list(self.label_map)] = stored
        return seen


class ViewedSplit(ClientSplit):
    """A client's part seen through its view.

    Args:
        inputs: Stored inputs of the whole data set, shape (N, ...).
        targets: Stored classes of the whole data set, shape (N,), int64.
        indices: This part's samples, shape (n,), int64.
        transform: Normalization and augmentation.
        view: How the client sees them.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, indices: Tensor, transform: BatchTransform, view: ClientView
    ) -> None:
        super().__init__(inputs, targets, indices, transform)
        self.view = view

    @property
    def targets(self) -> Tensor:
        """Classes as the client sees them, shape (n,), int64."""
        return self.view.targets(super().targets)

    @property
    def raw_inputs(self) -> Tensor:
        """Inputs as the client sees them, shape (n, ...), before augmentation and normalization."""
        return self.view.inputs(super().raw_inputs)


def rotate_images(images: Tensor, degrees: float, chunk: int = 1024) -> Tensor:
    """Turn images counter-clockwise.

    Multiples of 90 degrees move pixels and are exact. Other angles are interpolated (bilinear, torchvision); the
    corners that come into view are zero, which is black in stored images.

    Args:
        images: Shape (n, C, H, W), any dtype.
        degrees: The angle.
        chunk: Images that are interpolated together, which bounds the memory needed.

    Returns:
        New tensor of the same shape and dtype; H and W change places for a quarter turn.
    """
    turns, rest = divmod(degrees, 90.0)
    if rest == 0:
        return torch.rot90(images, int(turns) % 4, (-2, -1)).contiguous()
    from torchvision.transforms.functional import InterpolationMode, rotate

    return torch.cat([rotate(part, degrees, InterpolationMode.BILINEAR) for part in images.split(chunk)])


def check_views(views: Sequence[ClientView], input_shape: Sequence[int]) -> None:
    """Check that every client's view suits the inputs.

    Args:
        views: One view a client.
        input_shape: Shape of one input.

    Raises:
        ValueError: If inputs that are no images are to be rotated, or a quarter turn would change their shape.
    """
    shape = tuple(input_shape)
    for client, view in enumerate(views):
        if view.rotation and len(shape) != 3:
            raise ValueError(
                f"client {client} is to see its inputs turned by {view.rotation:g} degrees, which takes images of "
                f"shape (C, H, W); the inputs have shape {shape}: leave FeatureShift away for such data"
            )
        if view.rotation in (90.0, 270.0) and shape[1] != shape[2]:
            raise ValueError(
                f"client {client} is to see its images turned by {view.rotation:g} degrees, which would make "
                f"{shape[2]} x {shape[1]} (width x height) into {shape[1]} x {shape[2]}: give square images "
                "(image_size), or angles other than 90 and 270"
            )


def views_to_bytes(views: Sequence[ClientView]) -> bytes:
    """All views as bytes, the same on every machine; none at all where every client sees the samples as they are."""
    if all(view.is_identity for view in views):
        return b""
    pieces = []
    for view in views:
        label_map = np.array(view.label_map or (), dtype="<i8")
        pieces += [np.array(view.rotation, dtype="<f8").tobytes(), np.array(len(label_map), "<i8").tobytes()]
        pieces.append(label_map.tobytes())
    return b"".join(pieces)


def views_to_arrays(views: Sequence[ClientView]) -> dict[str, npt.NDArray[Any]]:
    """All views as the arrays of a file, see :func:`views_from_arrays`; nothing where there is nothing to record."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    if any(view.rotation for view in views):
        arrays["rotations"] = np.array([view.rotation for view in views])
    if num_classes := max((len(view.label_map or ()) for view in views), default=0):
        arrays["label_maps"] = np.array([view.label_map or range(num_classes) for view in views], dtype=np.int64)
    return arrays


def views_from_arrays(content: Mapping[str, Any]) -> list[ClientView]:
    """The views that a file records.

    Args:
        content: May have ``rotations``, shape (m,), in degrees, and ``label_maps``, shape (m, C).

    Returns:
        One view a client; none at all if the file records none.

    Raises:
        ValueError: If they are no such arrays, or belong to different numbers of clients.
    """
    rotations, maps = content.get("rotations"), content.get("label_maps")
    if rotations is None and maps is None:
        return []
    turned = np.zeros(len(maps)) if rotations is None else np.asarray(rotations, dtype=np.float64)  # type: ignore[arg-type]
    mapped = [None] * len(turned) if maps is None else np.asarray(maps).tolist()
    if turned.ndim != 1 or len(mapped) != len(turned):
        raise ValueError(f"'rotations' has shape {turned.shape}, 'label_maps' is of {len(mapped)} clients")
    return [ClientView(float(angle), own) for angle, own in zip(turned, mapped, strict=True)]


def describe_views(views: Sequence[ClientView]) -> list[str]:
    """A few words on each client's view, such as ``90°`` or ``labels 1``; empty for the samples as they are.

    Label maps are numbered in the order in which they first appear, from 1.
    """
    numbers: dict[tuple[int, ...], int] = {}
    words = []
    for view in views:
        own = [f"{view.rotation:g}°"] if view.rotation else []
        if view.label_map is not None:
            own.append(f"labels {numbers.setdefault(view.label_map, len(numbers) + 1)}")
        words.append(", ".join(own))
    return words
