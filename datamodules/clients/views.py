"""Views of clients on their samples: rotated images, or permuted labels. The stored samples are unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pfl_lightning.datamodules.counting import Ints


@dataclass(frozen=True)
class ClientView:
    """Rotation and relabeling of one client's samples, the same in its train, validation and test split.

    Attributes:
        rotation: Degrees by which every image is rotated counter-clockwise; kept in [0, 360).
        label_map: A permutation of the classes: a sample of class c counts as ``label_map[c]``. None keeps the classes;
            the identity becomes None.

    Raises:
        ValueError: If the rotation is not finite, or the label map is no permutation.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import ClientView
        >>> view = ClientView(rotation=-90, label_map=(2, 0, 1))
        >>> view.rotation, view.targets(torch.tensor([0, 1, 2])).tolist()
        (270.0, [2, 0, 1])
        >>> view.inputs(torch.tensor([[[[1, 2], [3, 4]]]])).tolist()
        [[[[3, 1], [4, 2]]]]
        >>> ClientView(rotation=360, label_map=(0, 1, 2)).is_identity
        True
    """

    rotation: float = 0.0
    label_map: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check both and normalize them, so that equal views compare equal."""
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
        """True if the client sees the samples as stored."""
        return self.rotation == 0.0 and self.label_map is None

    def inputs(self, stored: Tensor) -> Tensor:
        """Inputs as the client sees them, shape (n, ...); a rotation needs images, shape (n, C, H, W)."""
        return rotate_images(stored, self.rotation) if self.rotation else stored

    def targets(self, stored: Tensor) -> Tensor:
        """Classes as the client sees them, shape (n,), int64."""
        return stored if self.label_map is None else torch.tensor(self.label_map, device=stored.device)[stored]

    def counts(self, stored: Ints) -> Ints:
        """Counts of the classes as the client sees them, from counts of the stored classes, shape (C,)."""
        if self.label_map is None:
            return stored
        seen = np.empty_like(stored)
        seen[list(self.label_map)] = stored
        return seen


def rotate_images(images: Tensor, degrees: float, chunk: int = 1024) -> Tensor:
    """Images rotated counter-clockwise.

    Multiples of 90 degrees move pixels and are exact. Other angles are interpolated (bilinear, torchvision); corners
    from outside the image are zero, which is black in stored images.

    Args:
        images: Shape (n, C, H, W), any dtype.
        degrees: The angle.
        chunk: Images that are interpolated at a time, which bounds the memory needed.

    Returns:
        New tensor of the same shape and dtype; H and W are exchanged for a quarter turn.

    Example:
        >>> rotate_images(torch.tensor([[[[1, 2], [3, 4]]]]), 90.0).tolist()
        [[[[2, 4], [1, 3]]]]
    """
    turns, rest = divmod(degrees, 90.0)
    if not len(images):
        return images.clone()
    if rest == 0:
        return torch.rot90(images, int(turns) % 4, (-2, -1)).contiguous()
    from torchvision.transforms.functional import InterpolationMode, rotate

    return torch.cat([rotate(piece, degrees, InterpolationMode.BILINEAR) for piece in images.split(chunk)])


def check_views(views: Sequence[ClientView], input_shape: Sequence[int]) -> None:
    """Check that every client's view fits the inputs.

    Args:
        views: One view per client.
        input_shape: Shape of one input.

    Raises:
        ValueError: If a rotation applies to inputs that are no images, or a quarter turn would change their shape.
    """
    shape = tuple(input_shape)
    for client, view in enumerate(views):
        quarter = view.rotation in (90.0, 270.0)
        if view.rotation and (len(shape) != 3 or (quarter and shape[1] != shape[2])):
            raise ValueError(
                f"client {client} sees its inputs rotated by {view.rotation:g} degrees, which needs images of shape "
                f"(C, H, W), and square ones for 90 and 270 degrees; the inputs have shape {shape}: give such images "
                "(image_size), or other angles to FeatureShift"
            )


def views_to_bytes(views: Sequence[ClientView]) -> bytes:
    """Bytes of all views, the same on every machine; empty if every client sees the samples as stored."""
    if all(view.is_identity for view in views):
        return b""
    rows = [(np.array(view.rotation, dtype="<f8"), view.label_map or ()) for view in views]
    return b"".join(turned.tobytes() + np.array([len(own), *own], dtype="<i8").tobytes() for turned, own in rows)


def views_to_arrays(views: Sequence[ClientView]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of all views for a file, see :func:`views_from_arrays`; empty if every view is the identity."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    if any(view.rotation for view in views):
        arrays["rotations"] = np.array([view.rotation for view in views])
    if num_classes := max((len(view.label_map or ()) for view in views), default=0):
        arrays["label_maps"] = np.array([view.label_map or range(num_classes) for view in views], dtype=np.int64)
    return arrays


def views_from_arrays(content: Mapping[str, Any]) -> list[ClientView]:
    """Views from the arrays of a file.

    Args:
        content: May have ``rotations``, shape (m,), in degrees, and ``label_maps``, shape (m, C).

    Returns:
        One view per client; an empty list if the file has neither array.

    Raises:
        ValueError: If the arrays have other shapes, or differ in the number of clients.
    """
    rotations, maps = content.get("rotations"), content.get("label_maps")
    if rotations is None and maps is None:
        return []
    turned = np.zeros(len(maps)) if rotations is None else np.asarray(rotations, dtype=np.float64)  # type: ignore[arg-type]
    mapped = [None] * len(turned) if maps is None else np.asarray(maps).tolist()
    if turned.ndim != 1 or len(mapped) != len(turned):
        raise ValueError(f"'rotations' has shape {turned.shape}, 'label_maps' has {len(mapped)} clients")
    return [ClientView(float(angle), own) for angle, own in zip(turned, mapped, strict=True)]


def describe_views(views: Sequence[ClientView]) -> list[str]:
    """Short description of each client's view, such as ``90°`` or ``labels 1``; empty for the identity.

    Label maps are numbered from 1, in the order in which they first appear.

    Example:
        >>> describe_views([ClientView(), ClientView(rotation=90), ClientView(label_map=(1, 0))])
        ['', '90°', 'labels 1']
    """
    numbers: dict[tuple[int, ...], int] = {}
    words = []
    for view in views:
        own = [f"{view.rotation:g}°"] if view.rotation else []
        if view.label_map is not None:
            own.append(f"labels {numbers.setdefault(view.label_map, len(numbers) + 1)}")
        words.append(", ".join(own))
    return words
