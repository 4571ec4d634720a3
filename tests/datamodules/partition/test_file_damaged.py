"""Files of partitions that are empty, cut off, altered or of something else: what is said about them."""

import io
import json
import zipfile

import numpy as np
import pytest

from pfl_lightning.datamodules import IID, ClientView, Digits, FromFile, PartitionError, save_partition
from pfl_lightning.datamodules.partition.file import read_partition
from pfl_lightning.errors import DiskFullError

TRAIN = [np.array([0, 2, 5]), np.array([1, 3])]
TEST = [np.array([0, 1]), np.array([], dtype=int)]
VIEWS = [ClientView(), ClientView(rotation=90, label_map=(1, 0))]
ENDINGS = [".npz", ".json"]


@pytest.fixture(params=ENDINGS)
def path(request, tmp_path):
    found = tmp_path / f"parts{request.param}"
    save_partition(found, TRAIN, TEST, views=VIEWS, num_samples=6)
    return found


def content_of(path):
    found = read_partition(path)
    lists = {name: [own.tolist() for own in part] for name, part in found.parts.items()}
    return lists, [(view.rotation, tuple(view.label_map or ())) for view in found.views], found.num_samples


def test_what_is_written_fits_its_checksum(path):
    assert content_of(path) == ({"train": [[0, 2, 5], [1, 3]], "test": [[0, 1], []]}, [(0, ()), (90, (1, 0))], 6)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_of_another_data_set(path, tmp_path):
    assert len(FromFile(str(path)).partition(np.zeros(6, int))) == 2
    with pytest.raises(PartitionError, match=r"divides a data set of 6 samples, this one has 7: use the file of this"):
        FromFile(str(path)).partition(np.zeros(7, int))
    data = Digits(IID(3))
    data.setup()
    data.save_partition(tmp_path / "digits.npz")
    assert read_partition(tmp_path / "digits.npz").num_samples == 1797
    again = Digits(FromFile(str(tmp_path / "digits.npz")))
    again.setup()
    assert again.fingerprint == data.fingerprint


def test_both_kinds_have_the_same_checksum(tmp_path):
    for ending in ENDINGS:
        save_partition(tmp_path / f"a{ending}", TRAIN, TEST, views=VIEWS)
    with np.load(tmp_path / "a.npz") as arrays:
        assert int(arrays["checksum"]) == json.loads((tmp_path / "a.json").read_text())["checksum"]


def test_whatever_byte_is_altered(path):
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    expected, refused = content_of(path), 0
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1 << rng.integers(8)
        path.write_bytes(bytes(altered))
        try:
            assert FromFile(str(path)).num_clients == 2
            assert content_of(path) == expected
        except PartitionError as error:
            assert str(path) in str(error)  # noqa: PT017
            refused += 1
    assert refused > len(whole) / 3


def test_wherever_it_is_cut_off(path):
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(PartitionError, match=r"or damaged: (?s:.*); make it again with `pfl par"):
            FromFile(str(path))


def test_rows_that_are_missing_and_what_to_do_after_an_edit(tmp_path):
    path = tmp_path / "a.json"
    save_partition(path, TRAIN, TEST, views=VIEWS)
    whole = json.loads(path.read_text())
    for change in ({"test": [[0, 1], [1]]}, {"train": [[0, 2], [1, 3]]}, {"rotations": [0, 180]}):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(
            PartitionError, match=r"a\.json is damaged: its content does not fit its checksum.*remove 'c"
        ):
            FromFile(str(path))
    path.write_text(json.dumps({name: content for name, content in whole.items() if name != "test"}))
    with pytest.raises(PartitionError, match="does not fit its checksum"):
        FromFile(str(path))
    del whole["checksum"]
    path.write_text(json.dumps(whole | {"train": [[0, 2], [1, 3]]}))
    assert FromFile(str(path)).num_clients == 2


def test_files_of_something_else(tmp_path):
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    (tmp_path / "other.json").write_text('{"accuracy": 0.5}')
    for name in ("other.npz", "other.json"):
        with pytest.raises(PartitionError, match="expected index lists named 'train', found nothing"):
            FromFile(str(tmp_path / name))
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(PartitionError, match=r"single\.npz is not a partition"):
        FromFile(str(tmp_path / "single.npz"))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(PartitionError, match=r"deep\.json is not a partition.*RecursionError"):
        FromFile(str(tmp_path / "deep.json"))


@pytest.mark.parametrize("train", [[[2**63]], [[2**64]], [[1e300]]])
def test_numbers_that_no_index_can_be(tmp_path, train):
    (tmp_path / "a.json").write_text(json.dumps({"train": train}))
    with pytest.raises(PartitionError, match=r"must be unique numbers of samples|instead of a list of whole numbers"):
        FromFile(str(tmp_path / "a.json"))


def test_sizes_that_overflow(tmp_path):
    np.savez(tmp_path / "a.npz", train=np.empty(0, dtype=int), train_sizes=np.full(4, 2**62))  # their sum is 0
    with pytest.raises(PartitionError, match=r"'train' has shape \(0,\)"):
        FromFile(str(tmp_path / "a.npz"))


def test_a_header_that_claims_more_than_there_is(tmp_path):
    file = io.BytesIO()
    claimed = {"descr": "<i8", "fortran_order": False, "shape": (2, 3_000_000_000_000_000)}
    np.lib.format.write_array_header_1_0(file, claimed)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("train.npy", file.getvalue() + bytes(48))
    with pytest.raises(PartitionError, match=r"a\.npz is not a partition"):
        FromFile(str(tmp_path / "a.npz"))


def test_a_write_that_fails_leaves_the_file_before(path, monkeypatch):
    before = path.read_bytes()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(DiskFullError, match=rf"{path.name} cannot be written \(No space left"):
        save_partition(path, TRAIN[:1])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
