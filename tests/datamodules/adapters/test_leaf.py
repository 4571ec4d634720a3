"""LEAF's JSON files."""

import json

import pytest
import torch

from pfl_lightning.datamodules import FromLEAF


def write(path, **users):
    data = {name: {"x": [[n + 0.5, float(len(name))] for n in range(count)], "y": [n % 3 for n in range(count)]}
            for name, count in users.items()}  # fmt: skip
    content = {"users": [*users], "num_samples": [*users.values()], "user_data": data}
    path.write_text(json.dumps(content))


def test_users_of_several_files_are_clients(tmp_path):
    write(tmp_path / "b.json", writer_0042=12, f7=18)
    write(tmp_path / "a.json", f7=6)
    data = FromLEAF(str(tmp_path), validation_share=0.0)
    data.setup()
    assert (data.client_names, data.num_classes, data.input_shape) == (("f7", "writer_0042"), 3, (2,))
    sizes = [len(data.client_data(k).train) + len(data.client_data(k).test) for k in range(2)]
    assert sizes == [24, 12]
    assert data.client_data(1).train.raw_inputs[:, 1].unique().tolist() == [11.0]


def test_test_samples_of_the_same_users(tmp_path):
    write(tmp_path / "train.json", a=9, bb=9)
    write(tmp_path / "test.json", bb=3, a=6)
    data = FromLEAF(str(tmp_path / "train.json"), test_path=str(tmp_path / "test.json"), validation_share=0.0)
    data.setup()
    assert [len(data.client_data(k).test) for k in range(2)] == [6, 3]
    assert torch.equal(data.client_data(1).test.raw_inputs[:, 0], torch.tensor([0.5, 1.5, 2.5]))
    assert data.client_data(1).test.targets.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"x": [[1.0]], "y": [0, 1]}, "1 inputs, and 2 classes"),
        ({"x": [["text"]], "y": [0]}, "of user 'b', is not in LEAF's format.*could not convert"),
        ({"x": [[1.0, 2.0]], "y": [0]}, r"inputs of shape \(2,\), and others of \(1,\)"),
        ({"x": [[1.0]], "y": [0.5]}, "classes from 0"),
        ({"x": [[1.0]]}, "KeyError: 'y'"),
    ],
)
def test_other_files_are_refused(tmp_path, user, message):
    content = {"users": ["a", "b"], "user_data": {"a": {"x": [[1.0]], "y": [0]}, "b": user}}
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        FromLEAF(str(tmp_path / "t.json"))


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no LEAF data"):
        FromLEAF(str(tmp_path))
