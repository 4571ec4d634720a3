"""Columns of a table as numbers: standardized, or one for each category, as the training rows say."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.names import did_you_mean
from pfl_lightning.notices import few_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MISSING = "missing"
"""Category of cells without a value."""

OFTEN = 0.5
"""Share of the rows up to which text has categories; if more of them differ, it is a name, a number or prose."""


@dataclass(frozen=True)
class Column:
    """A column as features.

    Attributes:
        name: Its name.
        categories: Its categories, each a feature of 0 or 1; empty for a column of numbers.
        fill: What missing numbers are taken for, the median.
        mean: Mean of the numbers, those filled in included.
        std: Their standard deviation.
    """

    name: str
    categories: tuple[str, ...] = ()
    fill: float = 0.0
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class TableEncoding:
    """Features of a table's columns, as its training rows say.

    Attributes:
        columns: The columns that are used, in their order.
    """

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> TableEncoding:
        """The encoding that :func:`dataclasses.asdict` has made plain values of, read back from JSON or not."""
        return cls(tuple(Column(**{**own, "categories": tuple(own["categories"])}) for own in plain["columns"]))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for each feature: ``age``, ``ward=surgery``."""
        each = ([f"{own.name}={one}" for one in own.categories] or [own.name] for own in self.columns)
        return tuple(name for names in each for name in names)

    def features(self, table: DataFrame) -> tuple[Tensor, dict[str, int]]:
        """Features of rows.

        Args:
            table: Rows with these columns, and maybe others.

        Returns:
            float32 of shape (N, d); and, by column, the number of cells with a category that no training row has,
            whose features are all 0.

        Raises:
            ValueError: If a column is missing, or has text or infinite numbers in the place of numbers.
        """
        columns = [str(name) for name in table.columns]
        if missing := [own.name for own in self.columns if own.name not in columns]:
            near = did_you_mean(missing[0], columns)
            raise ValueError(f"rows have no column {missing[0]!r}, their columns are {few_of(columns, 20)}{near}")
        found, unknown = [np.empty((len(table), 0))], {}
        for own in self.columns:
            if own.categories:
                texts = _texts(table[own.name])
                one_hot = texts[:, None] == np.array(own.categories, dtype=object)
                if missed := int((~one_hot.any(axis=1)).sum()):
                    unknown[own.name] = missed
                found.append(one_hot)
            else:
                values = _numbers(table[own.name])
                found.append(((np.where(np.isnan(values), own.fill, values) - own.mean) / own.std)[:, None])
        return torch.from_numpy(np.concatenate(found, axis=1).astype(np.float32)), unknown


def fit_encoding(table: DataFrame, training: Ints, categorical: Sequence[str] = ()) -> TableEncoding:
    """Categories, medians, means and deviations of the training rows.

    Warns once of missing numbers that are filled in, and of columns that are constant, which are left out.

    Args:
        table: The columns that become features.
        training: Positions of the training rows.
        categorical: Columns of numbers that stand for categories.

    Raises:
        ValueError: If a column has dates, text without categories, or infinite numbers, or all columns are constant.

    Example:
        >>> import pandas
        >>> rows = pandas.DataFrame({"age": [40.0, 60.0, 90.0], "ward": ["a", "b", "c"]})
        >>> encoding = fit_encoding(rows, np.array([0, 1]))
        >>> encoding.feature_names
        ('age', 'ward=a', 'ward=b')
        >>> encoding.features(rows)
        (tensor([[-1.,  1.,  0.],
                [ 1.,  0.,  1.],
                [ 4.,  0.,  0.]]), {'ward': 1})
    """
    columns: list[Column] = []
    constant: list[Column] = []
    missing: dict[str, int] = {}
    for name in table.columns:
        values = table[name]
        if name in categorical or not _is_number(values):
            _check_categories(values, name in categorical)
            found = sorted(set(_texts(values.iloc[training])), key=lambda one: (one == MISSING, one))
            (columns if len(found) > 1 else constant).append(Column(name, tuple(found)))
            continue
        numbers = _numbers(values)
        own = numbers[training]
        absent = np.isnan(own)
        if not len(known := own[~absent]):
            constant.append(Column(name))
            continue
        fill = float(np.median(known))
        own = np.where(absent, fill, own)
        if np.isnan(numbers).any():
            missing[name] = int(np.isnan(numbers).sum())
        std = float(own.std())
        is_same = bool((own == own[0]).all())  # of which a deviation may be a rounding error
        (constant if is_same else columns).append(Column(name, (), fill, float(own.mean()), std))
    if missing:
        listed = ", ".join(f"{name!r} {count}" for name, count in missing.items())
        warnings.warn(
            f"missing numbers are replaced with the median of their column's training rows: {listed} of {len(table)} "
            "rows. Fill them in yourself where the median is wrong",
            stacklevel=2,
        )
    if constant:
        listed = ", ".join(repr(own.name) for own in constant)
        if not columns:
            raise ValueError(f"every column is constant over the training rows ({listed}): use columns that vary")
        warnings.warn(f"columns left out, as they are constant over the training rows: {listed}", stacklevel=2)
    return TableEncoding(tuple(columns))


def _is_number(values: Series[Any]) -> bool:
    return values.dtype.kind in "iuf"


def _numbers(values: Series[Any]) -> Any:
    """Numbers of a column as float64, NaN for those that are missing."""
    if not _is_number(values):
        raise ValueError(f"the column {values.name!r} has {values.dtype} instead of numbers: correct its cells")
    found = values.to_numpy(dtype=np.float64, na_value=np.nan)
    if len(places := np.flatnonzero(np.isinf(found))):
        raise ValueError(
            f"the column {values.name!r} has {len(places)} infinite numbers, the first in {row(places[0])}: correct "
            "them, or empty these cells, which are then missing"
        )
    return found


def _texts(values: Series[Any]) -> Any:
    """Categories of a column's cells as strings; whole numbers without a point, whether others are missing or not."""
    absent = values.isna().to_numpy()
    cells: Any = values.to_numpy(dtype=object)
    plain = (
        int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in np.where(absent, 0, cells)
    )
    return np.where(absent, MISSING, np.array([str(cell).strip() for cell in plain], dtype=object))


def _check_categories(values: Series[Any], said: bool) -> None:
    """Refuse columns of text that have no categories."""
    import pandas

    name, known = values.name, values.dropna()
    if values.dtype.kind in "mM":
        raise ValueError(
            f"the column {name!r} has dates: convert them to numbers, such as an age, or name other columns in features"
        )
    numbers = pandas.to_numeric(known.astype(object), errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    wrong = np.flatnonzero(np.isnan(numbers))
    if not said and values.dtype.kind != "b" and 0 < len(wrong) < OFTEN * len(known):
        place = int(values.index.get_indexer(known.index[wrong[:1]])[0])
        raise ValueError(
            f"the column {name!r} has numbers, except in {len(wrong)} cells, such as {known.iloc[wrong[0]]!r} in "
            f"{row(place)}: correct these cells, or empty them, or name the column in categorical"
        )
    count = known.nunique()
    if count > max(20, OFTEN * len(known)):
        raise ValueError(
            f"the column {name!r} has {count} different entries in {len(known)} rows, such as {known.iloc[0]!r}: too "
            "many for categories. List the columns to use in features, without this one (decimals need a "
            "point)"
        )


def row(place: int) -> str:
    """A row in words: the first one below the header is row 1."""
    return f"row {place + 1}"
