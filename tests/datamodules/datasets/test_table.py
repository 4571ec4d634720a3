"""FromTable: rows of a CSV or Parquet file, one column of which says whose a row is."""

import re
import sys
import warnings

import numpy as np
import pytest
import torch

from pfl_lightning.datamodules import FromTable
from pfl_lightning.errors import ConfigurationError

pd = pytest.importorskip("pandas")


def patients(count=120, seed=0):
    rng = np.random.default_rng(seed)
    age, ward = rng.normal(60, 12, count), rng.choice(["surgery", "heart", "eyes"], count)
    state = np.where(age + rng.normal(0, 3, count) > 60, "ill", "well")
    site = rng.choice(["Lyon", "Nice", "Metz"], count, p=[0.5, 0.3, 0.2])
    return pd.DataFrame({"site": site, "age": age, "ward": ward, "code": rng.integers(0, 3, count), "state": state})


def saved(tmp_path, table, name="patients.csv"):
    path = tmp_path / name
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return str(path)


def ready(path, **options):
    data = FromTable(path, target="state", client="site", **options)
    data.setup()
    return data


def rows_of(data, part):
    return np.concatenate([getattr(data.client_data(k), part).indices.numpy() for k in range(data.num_clients)])


def test_features_against_sklearn_on_the_training_rows(tmp_path):
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table = patients()
    data = ready(saved(tmp_path, table), categorical=["code"], test_share=0.3, validation_share=0.2)
    train = rows_of(data, "train")
    scaled = StandardScaler().fit(table[["age"]].iloc[train]).transform(table[["age"]])
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(table[["ward", "code"]].iloc[train])
    expected = np.concatenate([scaled, encoder.transform(table[["ward", "code"]])], axis=1)
    inputs = data.client_data(0).train._inputs
    assert inputs.dtype == torch.float32
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=0, atol=1e-5)
    names = ("age", "ward=eyes", "ward=heart", "ward=surgery", "code=0", "code=1", "code=2")
    assert data.encoding.feature_names == names


def test_each_row_is_once_in_a_part_of_its_own_client(tmp_path):
    table = patients()
    data = ready(saved(tmp_path, table), test_share=0.25, validation_share=0.1)
    assert data.client_names == ("Lyon", "Metz", "Nice")
    assert data.class_names == ("ill", "well")
    parts = [rows_of(data, part) for part in ("train", "validation", "test")]
    assert sorted(np.concatenate(parts)) == [*range(len(table))]
    for client, name in enumerate(data.client_names):
        own = data.client_data(client)
        for part in (own.train, own.validation, own.test):
            assert (table["site"].iloc[part.indices.numpy()] == name).all()
            assert [data.class_names[c] for c in part.targets] == [*table["state"].iloc[part.indices]]
        size = int((table["site"] == name).sum())
        assert abs(len(own.test) - 0.25 * size) <= 0.5
        ill = table["state"].eq("ill") & table["site"].eq(name)
        assert abs((own.test.targets == 0).sum() - 0.25 * ill.sum()) <= 1  # stratified


def test_parquet_and_other_separators_give_the_same(tmp_path):
    pytest.importorskip("pyarrow")
    table = patients()
    data = ready(saved(tmp_path, table))
    table.to_csv(tmp_path / "other.csv", sep=";", index=False, encoding="utf-8-sig")
    for path in (str(tmp_path / "other.csv"), saved(tmp_path, table, "patients.parquet")):
        other = ready(path)
        assert torch.equal(other.client_data(0).train._inputs, data.client_data(0).train._inputs)
        assert (other.fingerprint, other.client_names) == (data.fingerprint, data.client_names)


def test_names_keep_their_zeros_and_numbers_are_sorted_as_numbers(tmp_path):
    table = patients(40)
    table["site"] = ["0042", "0007"] * 20
    assert ready(saved(tmp_path, table)).client_names == ("0007", "0042")
    table["site"] = [10, 9] * 20
    assert ready(saved(tmp_path, table)).client_names == ("9", "10")
    table["site"] = [0, 1] * 20
    assert ready(saved(tmp_path, table)).client_names is None


def test_missing_cells_are_medians_or_a_category_and_said_once(tmp_path):
    table = patients()
    table.loc[::7, "age"] = np.nan
    table.loc[::5, "ward"] = None
    path = saved(tmp_path, table)
    with pytest.warns(UserWarning, match=r"missing numbers .*'age' 18 of 120 rows") as said:
        data = ready(path)
    assert sum("missing numbers" in str(one.message) for one in said) == 1
    train = rows_of(data, "train")
    median = table["age"].iloc[train].median()
    column, names = table["age"].fillna(median), data.encoding.feature_names
    expected = (column - column.iloc[train].mean()) / column.iloc[train].std(ddof=0)
    inputs = data.client_data(0).train._inputs
    np.testing.assert_allclose(inputs[:, 0].numpy(), expected, rtol=0, atol=1e-5)
    assert np.array_equal(inputs[:, names.index("ward=missing")].numpy() == 1, table["ward"].isna())


def test_categories_of_test_rows_alone_are_zeros_and_counted(tmp_path):
    table = patients()
    held = rows_of(ready(saved(tmp_path, table)), "test")[:3]
    table.loc[held, "ward"] = ["teeth", "skin", "skin"]  # the division knows classes alone
    with pytest.warns(UserWarning, match="no training row has.*'ward' 3 of 120 rows"):
        data = ready(saved(tmp_path, table))
    names = data.encoding.feature_names
    wards = [n for n, name in enumerate(names) if name.startswith("ward=")]
    assert len(wards) == 3
    assert not data.client_data(0).train._inputs[held][:, wards].any()


def test_constant_columns_are_left_out_and_said(tmp_path):
    table = patients().assign(same=3.1, word="x", empty=np.nan)
    with pytest.warns(UserWarning, match="columns left out, .*: 'same', 'word', 'empty'"):
        data = ready(saved(tmp_path, table))
    assert data.input_shape == (5,)
    with pytest.raises(ValueError, match="every column is constant"):
        ready(saved(tmp_path, table), features=["same", "word"])


def test_row_numbers_that_pandas_has_written_are_no_feature(tmp_path):
    patients().to_csv(tmp_path / "t.csv")
    with pytest.warns(UserWarning, match="first column .* has no name and is left out"):
        assert "Unnamed: 0" not in ready(str(tmp_path / "t.csv")).encoding.feature_names


def test_numbers_of_rows_are_said_to_be_features(tmp_path):
    table = patients().assign(patient=np.random.default_rng(1).permutation(120), dose=np.arange(120) // 2)
    with pytest.warns(
        UserWarning, match=r"'patient' of .* have a different whole number in every row .* list the other columns"
    ):
        ready(saved(tmp_path, table))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready(saved(tmp_path, table), features=["patient", "age"])
        ready(saved(tmp_path, table.drop(columns="patient")))


def test_a_class_of_one_client_is_said(tmp_path):
    table = patients()
    table.loc[table["site"] == "Metz", "state"] = "cured"
    with pytest.warns(UserWarning, match=re.escape("'cured' (1 (Metz))")):
        data = ready(saved(tmp_path, table))
    assert data.class_names == ("cured", "ill", "well")


def test_clients_without_tests_are_named(tmp_path):
    table = patients()
    table.loc[0, "site"] = "Ault"
    with pytest.warns(UserWarning, match=re.escape("client(s) 0 (Ault) have no test samples (1 of 4)")):
        ready(saved(tmp_path, table))


def test_the_fingerprint_is_of_every_cell_and_of_no_seed(tmp_path):
    table = patients()
    data = ready(saved(tmp_path, table))
    assert ready(saved(tmp_path, table), seed=3).data_fingerprint == data.data_fingerprint
    assert ready(saved(tmp_path, table)).fingerprint == data.fingerprint
    for column, cell in (("age", 61.5), ("ward", "teeth"), ("site", "Lyon"), ("state", "well")):
        other = table.copy()
        other.loc[other[column] != cell, column] = other[column].where(other.index != 70, cell)
        assert not other.equals(table) or table.loc[70, column] == cell
        if not other.equals(table):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a category in a test row
                assert ready(saved(tmp_path, other)).data_fingerprint != data.data_fingerprint


def test_other_rows_become_inputs_of_the_model(tmp_path):
    table = patients()
    data = ready(saved(tmp_path, table))
    assert torch.equal(data.inputs_of(table.iloc[5:9]), data.client_data(0).train._inputs[5:9])
    assert torch.equal(data.inputs_of(data.path), data.client_data(0).train._inputs)
    with pytest.raises(ValueError, match=r"the column 'age' has .* instead of numbers"):
        data.inputs_of(table.assign(age="old"))


def test_public_samples_are_encoded(tmp_path):
    data = ready(saved(tmp_path, patients()), public=20)
    assert data.public_split.raw_inputs.shape == (20, 5)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"target": "stat"}, r"target: .*has no column 'stat', .*; did you mean 'state'"),
        ({}, {"client": "hospital"}, "client: .*has no column 'hospital'.*its columns are site, age, ward"),
        ({}, {"features": ["age", "wards"]}, "features: .*has no column 'wards'"),
        ({}, {"categorical": ["codes"]}, "categorical: .*has no column 'codes'"),
        ({}, {"features": "age"}, "features must be a list of different columns, got 'age'"),
        ({}, {"features": ["age", "state"]}, "'state' is the target or client"),
        ({}, {"client": "state"}, "'state' is the target or client"),
        ({"site": ["Lyon"] * 119 + [None]}, {}, "names no client in 1 rows, the first is row 120"),
        ({"site": "Lyon"}, {}, "'site' .*has 1 different values"),
        ({"site": [f"p{n}" for n in range(120)]}, {}, "'site' .*has 120 different values in 120 rows"),
        ({"state": ["ill", None] * 60}, {}, r"'state' is missing in 60 rows .*row 2, of client \d \("),
        ({"state": np.linspace(0, 1, 120)}, {}, "'state' has 120 different values in 120 rows, 0.0 to 1.0.*federate"),
        ({"state": np.arange(120)}, {}, "'state' has 120 different values"),
        ({"state": "ill"}, {}, "'state' has 1 different values"),
        ({"age": ["61"] * 118 + ["61,5", "?"]}, {}, "'age' has numbers, except in 2 cells, such as '61,5' in row 119"),
        ({"ward": [f"note {n}" for n in range(120)]}, {}, "'ward' has 120 different entries"),
        ({"age": [1.0, np.inf] * 60}, {}, "'age' has 60 infinite numbers, the first in row 2"),
    ],
)
def test_what_a_table_lacks_is_said(tmp_path, change, options, message):
    path = saved(tmp_path, patients().assign(**change))
    with pytest.raises(ValueError, match=message):
        FromTable(path, **{"target": "state", "client": "site", **options}).setup()


def test_dates_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    table = patients().assign(born=pd.Timestamp("1950-01-01"))
    with pytest.raises(ValueError, match="'born' has dates"):
        ready(saved(tmp_path, table, "t.parquet"))


def test_files_that_are_no_table(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no table at"):
        ready(str(tmp_path / "none.csv"))
    (tmp_path / "t.csv").write_bytes("site,state\nNîmes,ill\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"cannot read the table .*UnicodeDecodeError.*UTF-8"):
        ready(str(tmp_path / "t.csv"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'pfl-lightning\[table\]'"):
        ready(str(tmp_path / "t.csv"))
