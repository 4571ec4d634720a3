"""A table, CSV or Parquet, of which one column says whose a row is."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.division import Division
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.datasets.columns import TableEncoding, fit_encoding, row
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.given import AsGiven, clients_of
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.names import did_you_mean
from pfl_lightning.notices import few_of
from pfl_lightning.options import DataOptions, Unpack

if TYPE_CHECKING:
    from pandas import DataFrame, Series

FEW = 20
"""Numbers of classes that are not taken for a quantity to predict."""


class FromTable(FederatedDataModule, gives="partition"):
    """Table whose rows are samples, with a column that names each row's client: a hospital, a branch, a writer.

    Each client's rows are split into training, validation and test rows (``test_share``, ``validation_share``), the
    classes in their proportions. Numbers are standardized and text becomes a feature of 0 or 1 for each category. What
    that needs, means, deviations, medians and categories, is of the training rows of all clients together: in a
    federation of real sites, they would have to tell each other these sums. A missing number is the median, missing
    text a category of its own. A category that no training row has is 0 in all features.

    Args:
        path: A CSV file (``.csv``, ``.tsv`` or ``.txt``, with a header, in UTF-8) or a Parquet file.
        target: Column of the class; its values are the class names.
        client: Column that says whose a row is; its values are the clients' names.
        features: Columns to predict from; None for all others.
        categorical: Columns of numbers that stand for categories, such as codes of wards.
        batch_size: Samples in a training batch.
        kwargs: See :class:`FederatedDataModule`.

    Attributes:
        encoding: What became of the columns, after :meth:`setup`; its ``feature_names`` name the features.

    Raises:
        FileNotFoundError: If there is no such file.
        ConfigurationError: If pandas is missing, or the table cannot be read.
        ValueError: If a column is missing, or the client's column lacks values or has a single one.

    Example:
        >>> import os, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "patients.csv"
        >>> rows = ["hospital,age,state"]
        >>> rows += [f"{'Lyon' if n % 3 else 'Nice'},{40 + n % 7},{'ill' if n % 2 else 'well'}" for n in range(60)]
        >>> _ = path.write_text(os.linesep.join(rows))
        >>> data = FromTable(str(path), target="state", client="hospital")
        >>> data.setup()
        >>> data.client_names, data.class_names, data.encoding.feature_names, data.input_shape
        (('Lyon', 'Nice'), ('ill', 'well'), ('age',), (1,))
    """

    read_once = ("_table",)
    encoding: TableEncoding

    def __init__(
        self,
        path: str,
        *,
        target: str,
        client: str,
        features: Sequence[str] | None = None,
        categorical: Sequence[str] = (),
        batch_size: int = 50,
        **kwargs: Unpack[DataOptions],
    ) -> None:
        self.path, self.target, self.client, self.features = str(path), target, client, features
        self.categorical = tuple(categorical)
        self._table: Any = read_table(Path(path), text=(client,))  # until the clients' rows are made inputs
        for what, names in (("target", [target]), ("client", [client]), ("features", features or [])):
            self._check_columns(what, names)
        self._check_columns("categorical", categorical)
        if mistaken := ({target, client} & {*(features or ()), *self.categorical}) or ({target} & {client}):
            raise ValueError(f"the column {mistaken.pop()!r} is the target or client, and cannot have a second use")
        self._clients, rule = self._find_clients()
        super().__init__(rule, batch_size, **kwargs)

    def _check_columns(self, what: str, names: Sequence[str]) -> None:
        columns = [str(name) for name in self._table.columns]
        if isinstance(names, str) or len(set(names)) < len(names):
            raise ValueError(f"{what} must be a list of different columns, got {names!r}")
        if missing := [name for name in names if name not in columns]:
            raise ValueError(
                f"{what}: {self.path} has no column {missing[0]!r}, its columns are {few_of(columns, 20)}"
                f"{did_you_mean(missing[0], columns)}"
            )

    def _find_clients(self) -> tuple[Ints, AsGiven]:
        """Client of each row, and the rule of the clients."""
        column = self._table[self.client]
        if len(empty := np.flatnonzero(column.isna())):
            raise ValueError(
                f"the column {self.client!r} of {self.path} names no client in {len(empty)} rows, the first is "
                f"{row(empty[0])}: fill them in, or remove these rows (empty cells, NA, None and null are missing)"
            )
        texts = column.astype(str).str.strip()
        digits = bool(texts.str.fullmatch(r"0|[1-9]\d{0,15}").all())
        owners = [int(own) if digits else own for own in texts]
        count = len(set(owners))
        if count < 2 or 2 * count > len(owners):
            raise ValueError(
                f"the column {self.client!r} of {self.path} has {count} different values in {len(owners)} rows: "
                "expected at least two clients, with two rows each on average"
            )
        return clients_of(owners)

    def load(self) -> Samples:
        """Number the classes; the inputs are row numbers until the clients' training rows are known.

        Raises:
            ValueError: If the target's column lacks values, or has numbers to predict.
        """
        column = self._table[self.target]
        if len(empty := np.flatnonzero(column.isna())):
            whose = self.partition.named([int(self._clients[empty[0]])])
            raise ValueError(
                f"the target {self.target!r} is missing in {len(empty)} rows of {self.path}, the first is "
                f"{row(empty[0])}, of client {whose}: fill it in, or remove these rows"
            )
        is_text = column.dtype.kind not in "iufb"
        cells = np.array((column.astype(str).str.strip() if is_text else column).tolist())
        if cells.dtype.kind == "f" and (cells % 1 == 0).all():
            cells = cells.astype(np.int64)
        values, targets = np.unique(cells, return_inverse=True)
        count, first, last = len(values), values[0], values[-1]
        if count < 2 or cells.dtype.kind == "f" or count > max(FEW, len(cells) / 10):
            raise ValueError(
                f"the target {self.target!r} has {count} different values in {len(cells)} rows, {first} to {last}: "
                "expected two classes or more, each with many rows. Group numbers into classes, or pass federate "
                "your own LightningModule that predicts them"
            )
        held = np.zeros((self.num_clients, count), dtype=np.int64)
        np.add.at(held, (self._clients, targets), 1)
        if alone := np.flatnonzero((held > 0).sum(axis=0) == 1).tolist():
            listed = [f"{str(values[c])!r} ({self.partition.named([int(held[:, c].argmax())])})" for c in alone]
            warnings.warn(
                f"classes that only one client has, so the others cannot be tested on them: {few_of(listed, 5)}",
                stacklevel=2,
            )
        rows, clients = torch.arange(len(targets)), torch.from_numpy(self._clients)
        return Samples(rows, torch.from_numpy(targets), tuple(map(str, values)), train_clients=clients)

    def _divide(self, samples: Samples) -> Division:
        from pandas.util import hash_pandas_object

        found, table = super()._divide(samples), self._table
        chosen = [one for one in table.columns if one not in (self.target, self.client)]
        if self.features is None and "Unnamed: 0" in chosen:
            warnings.warn(f"the first column of {self.path} has no name and is left out as row numbers", stacklevel=2)
            chosen.remove("Unnamed: 0")
        if self.features is None and (numbers := [one for one in chosen if _is_numbering(table[one])]):
            warnings.warn(
                f"{', '.join(map(repr, numbers))} of {self.path} have a different whole number in every row and are "
                "used as features: if they are ids of rows or patients, list the other columns in 'features'",
                stacklevel=2,
            )
        table = table[list(self.features or chosen)]
        rows, public = found.samples.train_inputs, found.samples.public_inputs
        self.encoding = fit_encoding(table, rows.numpy()[np.concatenate(found.train)], self.categorical)
        inputs, unknown = self.encoding.features(table)
        if unknown:
            warn_of_unknown(unknown, len(table))
        # Of all cells as they are: standardized ones depend on the seed of the division.
        content = hash_pandas_object(table, index=False).to_numpy().tobytes() + self._clients.tobytes()
        self._content = hashlib.sha256(repr([*table.columns]).encode() + content).hexdigest()[:16]
        self._table = None
        samples = replace(
            found.samples, train_inputs=inputs[rows], public_inputs=None if public is None else inputs[public]
        )
        return replace(found, samples=samples)

    @property
    def data_fingerprint(self) -> str:
        """Short hash of the data set, however it is divided: names of columns, and every cell."""
        own = replace(self._loaded.samples, train_inputs=torch.empty(len(self._loaded.samples.train_targets), 0))
        return hashlib.sha256(f"{own.fingerprint}{self._content}".encode()).hexdigest()[:16]

    @property
    def input_encoding(self) -> dict[str, Any] | None:
        """Columns, with categories, medians, means and deviations, and the column of the clients."""
        return {**asdict(self.encoding), "client": self.client}

    def inputs_of(self, table: Any, client: str | None = None) -> Tensor:
        """Inputs of other rows for a trained model, encoded by the statistics of this table's training rows.

        Args:
            table: A path, or a DataFrame, with this table's columns of features.
            client: Name of the client whose model takes them.

        Returns:
            float32 of shape (N, d).
        """
        return encoded(self.encoding, table, (self.client, client))

    def rows_by_client(self, path: Path) -> dict[int, Any]:
        """Rows of another table, a DataFrame for each client that has some there, by its number; warns of others.

        Raises:
            ConfigurationError: The table does not say whose its rows are.
        """
        table = read_table(path, [self.client])
        if self.client not in table.columns:
            raise ConfigurationError(
                f"{path} has no column {self.client!r}, which says by whose model a row is predicted: add it, or name "
                "one client for all rows (--client)"
            )
        known = self.client_names or tuple(map(str, range(self.num_clients)))
        named = table[self.client].astype(str).str.strip()
        if others := sorted({*named} - {*known}):
            warnings.warn(
                f"rows of clients that these data do not have are left out: {int(named.isin(others).sum())} of "
                f"{len(table)}, in the column {self.client!r} {few_of(others, 5)}",
                stacklevel=2,
            )
        found = {number: table[named == name] for number, name in enumerate(known)}
        return {number: rows for number, rows in found.items() if len(rows)}


def _is_numbering(column: Series) -> bool:
    """Whether a column has another whole number in each of many rows."""
    return column.dtype.kind in "iu" and len(column) > FEW and column.is_unique


def encoded(encoding: TableEncoding, table: Any, whose: tuple[str | None, str | None]) -> Tensor:
    """Features of the rows of a DataFrame, or of a table at a path, float32 of shape (N, d).

    Warns of cells with a category that no training row has, and of rows of other clients.

    Args:
        encoding: What became of the columns.
        table: The rows.
        whose: The column of the clients, and the name of the one whose model takes the rows, where they are known.
    """
    column, client = whose
    table = read_table(Path(table), [column] if column else ()) if isinstance(table, str | Path) else table
    if column in table.columns and client is not None:
        named = table[column].dropna().astype(str).str.strip()
        if others := sorted({*named} - {client}):
            warnings.warn(
                f"rows of other clients are predicted by the model of {client}, too: {int((named != client).sum())} of "
                f"{len(table)}, in the column {column!r} {few_of(others, 5)}; remove "
                "them from the table if that is not meant",
                stacklevel=2,
            )
    found, unknown = encoding.features(table)
    if unknown:
        warn_of_unknown(unknown, len(found))
    return found


def warn_of_unknown(unknown: Mapping[str, int], count: int) -> None:
    """Warn of cells, by column, with a category that no training row has; there are ``count`` rows."""
    listed = ", ".join(f"{name!r} {number}" for name, number in unknown.items())
    warnings.warn(
        f"rows with a category that no training row has; their features of this column are all 0: {listed} of {count} "
        "rows",
        stacklevel=3,
    )


def read_table(path: Path, text: Sequence[str]) -> DataFrame:
    """Read a CSV or Parquet file.

    Args:
        path: The file.
        text: Columns that are read as they are written, such as ``0042``.

    Raises:
        FileNotFoundError: If there is no such file.
        ConfigurationError: If pandas is missing, or the file is none of these.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no table at {path}: expected a CSV or Parquet file; correct 'path'")
    try:
        import pandas

        if path.suffix.lower() in (".parquet", ".pq"):
            return pandas.read_parquet(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
        separator = max(",;\t|", key=header.count)
        return pandas.read_csv(
            path, sep=separator, dtype=dict.fromkeys(text, str), encoding="utf-8-sig", low_memory=False
        )
    except ImportError as error:
        raise ConfigurationError(
            f"tables need pandas, and Parquet pyarrow: pip install 'pfl-lightning[table]' ({error})"
        ) from error
    except Exception as error:  # of damaged files, readers raise errors of any class
        raise ConfigurationError(
            f"cannot read the table {path}: {type(error).__name__}: {error}; expected CSV in UTF-8 with a header, or "
            "Parquet"
        ) from error
