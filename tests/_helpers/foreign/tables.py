"""pytorch-tabular's models over its own data module, and scvi-tools' training plan over single cells."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from typing import Any

from _helpers.foreign.project import Made, Project


def embedding() -> Made:
    return _tabular("classification")


def regression() -> Made:
    return _tabular("regression")


def _tabular(task: str) -> Made:
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    logging.getLogger("pytorch_tabular").setLevel(logging.ERROR)
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"age": draw.normal(size=48), "dose": draw.normal(size=48), "ward": ["a", "b", "c"] * 16})
    table["outcome"] = (table.age > 0).astype(int) if task == "classification" else table.age + table.dose
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it leaves a file of its own
        project = TabularModel(
            data_config=DataConfig(target=["outcome"], continuous_cols=["age", "dose"], categorical_cols=["ward"]),
            model_config=CategoryEmbeddingModelConfig(task=task, layers="8-8", dropout=0.1, learning_rate=1e-2),
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(batch_size=6, accelerator="cpu"),
            verbose=False,
        )
    data = project.prepare_dataloader(train=table[:36], validation=table[36:], seed=1)
    loaders = {"train_dataloaders": data.train_dataloader(), "val_dataloaders": data.val_dataloader()}
    return project.prepare_model(data), loaders  # as the package itself gives them to its Trainer


def cells() -> Made:
    import anndata
    import numpy as np
    import scvi
    from scvi.dataloaders import DataSplitter
    from scvi.model import SCVI
    from scvi.train import TrainingPlan

    scvi.settings.seed = 0  # of its division into training and validation
    counts = np.random.default_rng(0).poisson(2.0, (48, 10)).astype("float32")
    table = anndata.AnnData(counts)
    SCVI.setup_anndata(table)
    model = SCVI(table, n_hidden=8, n_latent=2, n_layers=1)
    data = DataSplitter(model.adata_manager, train_size=0.75, validation_size=0.25, batch_size=6)
    return TrainingPlan(model.module), {"datamodule": data}


def _model(name: str, make: Any, **options: Any) -> Project:
    return Project(
        "tables",
        "pytorch-tabular",
        name,
        "loaders of TabularDatamodule",
        make,
        ("pytorch_tabular",),
        monitor="valid_loss",
        head="head.layers.0",
        slow=True,
        **options,
    )


PROJECTS = [
    _model("CategoryEmbeddingModel", embedding),
    _model("CategoryEmbeddingModel, regression", regression),
    Project(
        "single cells",
        "scvi-tools",
        "SCVI, TrainingPlan",
        "DataSplitter of AnnData",
        cells,
        ("scvi", "anndata"),
        monitor="elbo_validation",
        slow=True,
    ),
]
