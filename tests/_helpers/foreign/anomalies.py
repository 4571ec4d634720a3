"""anomalib: a module whose parts are callbacks, over its own data module with a folder of pictures."""

from __future__ import annotations

import tempfile
from pathlib import Path

from _helpers.foreign.project import Made, Project

_kept: list[tempfile.TemporaryDirectory] = []


def ganomaly() -> Made:
    import numpy as np
    from anomalib.data import Folder
    from anomalib.models import Ganomaly
    from PIL import Image

    place = tempfile.TemporaryDirectory()
    _kept.append(place)
    draw = np.random.default_rng(0)
    for name, items in (("good", 36), ("test", 12), ("broken", 12)):
        folder = Path(place.name, name)
        folder.mkdir()
        for item in range(items):
            bright = 120 if name == "broken" else 0
            pixels = draw.integers(bright, bright + 100, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{item}.png")
    data = Folder(
        name="made",
        root=place.name,
        normal_dir="good",
        normal_test_dir="test",
        abnormal_dir="broken",
        train_batch_size=6,
        eval_batch_size=6,
        num_workers=0,
        val_split_mode="same_as_test",
    )
    pre_processor = Ganomaly.configure_pre_processor((32, 32))
    module = Ganomaly(
        batch_size=6, n_features=4, latent_vec_size=4, pre_processor=pre_processor, visualizer=False, evaluator=True
    )
    return module, {"datamodule": data}


PROJECTS = [
    Project(
        "anomalies",
        "anomalib",
        "Ganomaly",
        "Folder",
        ganomaly,
        ("anomalib",),
        monitor=None,
        slow=True,
        differs="its thresholds are set by a validation, which the comparison leaves out",
    )
]
