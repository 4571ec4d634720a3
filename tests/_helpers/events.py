"""Reading TensorBoard's event files back."""

import io
from pathlib import Path

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

ALL = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}


def board(folder, version=0):
    """A logger whose files lie in one folder."""
    return TensorBoardLogger(folder, name="", version=version)


def events(folder, version=0):
    """All events of a run."""
    found = EventAccumulator(str(Path(folder) / f"version_{version}"), size_guidance=ALL)
    found.Reload()
    return found


def scalars(found, tag):
    """Values by round, ascending (files of one second are read in any order); a round that was logged twice fails."""
    values = {event.step: event.value for event in found.Scalars(tag)}
    assert len(values) == len(found.Scalars(tag)), f"{tag} was logged twice in a round"
    return dict(sorted(values.items()))


def rounds(found, tag):
    """The rounds of an image, a histogram or a text, ascending."""
    kinds = {"images": found.Images, "histograms": found.Histograms, "tensors": found.Tensors}
    [read] = [read for kind, read in kinds.items() if tag in found.Tags()[kind]]
    return sorted(event.step for event in read(tag))


def picture(found, tag, round):
    """An image as pixels, (H, W, 3)."""
    [event] = [event for event in found.Images(tag) if event.step == round]
    with Image.open(io.BytesIO(event.encoded_image_string)) as image:
        return np.asarray(image.convert("RGB"))


def assert_drawn(pixels):
    """A picture of a sensible size with something on it."""
    assert min(pixels.shape[:2]) > 200
    assert max(pixels.shape[:2]) < 3000
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def charts(found):
    """The charts of the Custom Scalars tab: (category, title) to the tags of a line or of a band."""
    [event] = found.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    read = {}
    for category in layout.category:
        for chart in category.chart:
            band = [(s.value, s.lower, s.upper) for s in chart.margin.series]
            read[category.title, chart.title] = band or list(chart.multiline.tag)
    return read
