"""pytorch-forecasting and neuralforecast, with their own data sets and loaders."""

from __future__ import annotations

from typing import Any

from _helpers.foreign.project import Made, Project


def frame() -> Any:
    """Six series of thirty steps."""
    import numpy as np
    import pandas as pd

    draw = np.random.default_rng(0)
    rows = []
    for series in range(6):
        values = np.sin(np.arange(30) / 3 + series) + 0.1 * draw.standard_normal(30) + 2
        rows += [{"series": str(series), "time": place, "value": value} for place, value in enumerate(values)]
    return pd.DataFrame(rows)


def series(**options: Any) -> tuple[Any, dict[str, Any]]:
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import NaNLabelEncoder

    table = frame()
    train = TimeSeriesDataSet(
        table[table.time < 24],
        time_idx="time",
        target="value",
        group_ids=["series"],
        categorical_encoders={"series": NaNLabelEncoder().fit(table.series)},
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **options,
    )
    validation = TimeSeriesDataSet.from_dataset(train, table, min_prediction_idx=24)
    return train, {
        "train_dataloaders": train.to_dataloader(train=True, batch_size=16, num_workers=0),
        "val_dataloaders": validation.to_dataloader(train=False, batch_size=16, num_workers=0),
    }


def fusion() -> Made:
    from pytorch_forecasting import TemporalFusionTransformer

    train, data = series(static_categoricals=["series"], time_varying_known_reals=["time"])
    module = TemporalFusionTransformer.from_dataset(
        train, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, learning_rate=0.01
    )
    return module, data


def deep_ar() -> Made:
    from pytorch_forecasting import DeepAR

    train, data = series(static_categoricals=["series"])
    return DeepAR.from_dataset(train, hidden_size=8, rnn_layers=1, learning_rate=0.01), data


def n_beats() -> Made:
    from pytorch_forecasting import NBeats

    train, data = series()
    return NBeats.from_dataset(train, widths=[8, 16], num_blocks=[1, 1], learning_rate=0.01), data


def n_hits() -> Made:
    """neuralforecast's own module and data module, whose items are whole series."""
    import pandas as pd
    from neuralforecast.models import NHITS
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    table = frame().rename(columns={"series": "unique_id", "time": "ds", "value": "y"})
    table["ds"] = pd.Timestamp("2026-01-01") + pd.to_timedelta(table.ds, unit="D")
    series, *_ = TimeSeriesDataset.from_df(table)
    module = NHITS(h=4, input_size=8, mlp_units=3 * [[8, 8]], max_steps=10, windows_batch_size=16)
    module.val_size = module.test_size = 4
    return module, {"datamodule": TimeSeriesDataModule(series, batch_size=2, valid_batch_size=2)}


def _forecast(name: str, make: Any, **options: Any) -> Project:
    return Project(
        "forecasting",
        "pytorch-forecasting",
        name,
        "TimeSeriesDataSet",
        make,
        ("pytorch_forecasting",),
        **options,
    )


PROJECTS = [
    _forecast("TemporalFusionTransformer", fusion, head="output_layer"),
    _forecast("DeepAR", deep_ar, head="distribution_projector"),
    _forecast("NBeats", n_beats),
    Project(
        "forecasting",
        "neuralforecast",
        "NHITS",
        "TimeSeriesDataModule",
        n_hits,
        ("neuralforecast",),
        monitor="ptl/val_loss",
        slow=True,
    ),
]
