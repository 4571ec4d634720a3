"""The per-client state store, in memory or in a file, against a plain dictionary."""

import contextlib
import copy
import os
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from _helpers.toy import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.errors import CheckpointError, FederationError
from pfl_lightning.state.client_states import ClientStates, spill_to_disk

INITIAL = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}  # 16 bytes a row
PLACES = ["memory", "disk"]


def make(place, initial=None, clients=3, folder=None):
    states = ClientStates(INITIAL if initial is None else initial, clients)
    if place == "disk":
        states.move_to_disk(folder)
    return states


def filled(states, clients):
    for client in clients:
        states.set(client, {"w": torch.full((2,), float(client)), "n": torch.tensor(client)})
    return states


def values(states):
    return [(states.get(k)["w"].tolist(), int(states.get(k)["n"])) for k in range(len(states))]


@pytest.mark.parametrize("place", PLACES)
class TestOneStore:
    def test_a_client_has_the_initial_state_until_it_stores_one(self, place):
        states = make(place)
        new = {"w": torch.tensor([5.0, 6.0]), "n": torch.tensor(9)}
        states.set(1, new)
        new["w"].zero_()
        assert values(states) == [([1, 2], 3), ([5, 6], 9), ([1, 2], 3)]
        assert states.get(1)["n"].dtype == torch.int64
        assert [states.written(k) for k in range(3)] == [False, True, False]
        assert (len(states), states.num_bytes, states.most_bytes) == (3, 16, 48)
        assert states.on_disk == (place == "disk")

    def test_the_initial_state_is_a_copy(self, place):
        given = {"w": torch.ones(2)}
        states = make(place, given, 2)
        given["w"].zero_()
        assert states.get(0)["w"].tolist() == [1, 1]

    @pytest.mark.parametrize("elsewhere", PLACES)
    @pytest.mark.parametrize("written", [[], [2], [2, 0, 1]])
    def test_round_trip(self, place, elsewhere, written):
        states, other = filled(make(place), written), make(elsewhere, {"w": torch.zeros(2), "n": torch.tensor(0)})
        other.set(0, {"w": torch.full((2,), -1.0), "n": torch.tensor(-1)})
        other.load_state_dict(states.state_dict())
        assert values(other) == values(states)
        assert other.num_bytes == states.num_bytes == 16 * len(written)
        filled(states, [1])
        assert values(other) == [([float(k)] * 2, k) if k in written else ([1, 2], 3) for k in range(3)]

    def test_another_number_of_clients_is_refused(self, place):
        with pytest.raises(CheckpointError, match="holds 3 clients, this federation has 4"):
            make(place, clients=4).load_state_dict(make(place).state_dict())

    @pytest.mark.parametrize("other", [{}, {"w": torch.zeros(3), "n": torch.tensor(0)}, {"w": torch.zeros(2)}])
    def test_another_state_is_refused(self, place, other):
        with pytest.raises(CheckpointError, match="personal state has shapes"):
            make(place, other).load_state_dict(make(place).state_dict())

    @pytest.mark.parametrize(
        "change",
        [
            {"rows": {}},
            {"rows": {"w": torch.zeros(2, 2)}},
            {"rows": {"w": torch.zeros(1, 2), "n": torch.zeros(2, dtype=torch.int64)}},
            {"rows": {"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}},
            {"written": torch.tensor([0, 2, 1])},
            {"written": torch.tensor([0, 3])},
            {"written": torch.tensor([0, -1])},
            {"written": torch.tensor([1, 1])},
        ],
    )
    def test_rows_that_are_missing_are_refused_and_never_made_up(self, place, change):
        states, before = filled(make(place), [1]), filled(make(place), [0, 2])
        with pytest.raises(
            CheckpointError, match=r"the checkpoint is (incomplete: the|damaged: it has states of the) clients"
        ):
            states.load_state_dict({**before.state_dict(), **change})
        assert values(states) == values(filled(make(place), [1]))

    def test_an_empty_state_stays_empty(self, place):
        states = make(place, {}, 5)
        states.set(2, {})
        assert states.get(2) == {}
        assert states.num_bytes == 0

    def test_what_does_not_fit_is_refused_and_leaves_the_others_alone(self, place):
        states = filled(make(place), [0, 1])
        with pytest.raises(ValueError, match=r"w has shape \(3,\), expected \(2,\)"):
            states.set(0, {"w": torch.zeros(3), "n": torch.tensor(0)})
        with pytest.raises(IndexError, match="no client 3; clients are 0 to 2"):
            filled(states, [3])
        assert values(states)[1] == ([1, 1], 1)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda states: pickle.loads(pickle.dumps(states))])
    def test_a_copy_is_apart(self, place, duplicate):
        states = filled(make(place), [2, 0])
        other = duplicate(states)
        assert other.on_disk == states.on_disk
        assert values(other) == values(states)
        other.set(2, {"w": torch.zeros(2), "n": torch.tensor(0)})
        assert values(states) == [([0, 0], 0), ([1, 2], 3), ([2, 2], 2)]

    def test_a_checkpoint_takes_what_was_written_and_copies_nothing(self, place, tmp_path):
        few, many = (make(place, {"w": torch.zeros(500), "n": torch.tensor(0)}, m) for m in (20, 20_000))
        for states in (few, many):
            for client in (7, 3, 12):
                states.set(client, {"w": torch.randn(500), "n": torch.tensor(client)})
            rows = states.state_dict()["rows"]
            assert {name: r.untyped_storage().nbytes() for name, r in rows.items()} == {"w": 3 * 2000, "n": 3 * 8}
            assert rows["w"][1].data_ptr() == states.get(3)["w"].data_ptr()
        sizes = []
        for states in (few, many):
            torch.save(states.state_dict(), tmp_path / "states.pt")
            sizes.append((tmp_path / "states.pt").stat().st_size)
        assert sizes[0] == pytest.approx(sizes[1], abs=64)


def bits(tensor):
    """The bytes of a tensor: they tell one NaN from another."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 3, 2, 2)]
KINDS = st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=4)


def drawn(kinds, seed):
    """Random bytes as tensors, NaN and infinity among them; images in another memory layout."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for index, (dtype, shape) in enumerate(kinds):
        size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(high, (size,), generator=generator, dtype=torch.uint8)
        tensor = raw.view(dtype).view(shape)
        state[f"t.{index}"] = tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor
    return state


@settings(max_examples=40, deadline=None)
@given(
    kinds=KINDS,
    clients=st.integers(1, 6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), max_size=12),
    moves=st.sets(st.integers(0, 12)),
    place=st.sampled_from(PLACES),
)
def test_like_a_dictionary_bit_by_bit(kinds, clients, steps, moves, place):
    """Any sequence of writes gives the states of a dictionary, in memory, on disk, and moved in between."""
    initial = drawn(kinds, 0)
    states, expected = make(place, initial, clients), {}
    for step, (client, seed) in enumerate(steps):
        if step in moves:
            states.move_to_disk()
        state = drawn(kinds, seed)
        states.set(client % clients, state)
        expected[client % clients] = state
    other = make("memory" if states.on_disk else "disk", initial, clients)
    other.load_state_dict(states.state_dict())
    for found in (states, other):
        for client in range(clients):
            got, wanted = found.get(client), expected.get(client, initial)
            assert list(got) == list(wanted)
            assert all(got[n].dtype == wanted[n].dtype and got[n].shape == wanted[n].shape for n in wanted)
            assert {n: bits(t) for n, t in got.items()} == {n: bits(t) for n, t in wanted.items()}


@pytest.mark.parametrize("place", PLACES)
def test_a_state_of_another_precision_takes_that_of_the_store(place):
    states = make(place, {"w": torch.zeros(3, dtype=torch.bfloat16)})
    states.set(1, {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)})
    assert_same(states.get(1), {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)})
    wide = make(place, {"w": torch.zeros(3, dtype=torch.float64)})
    wide.load_state_dict(states.state_dict())
    assert_same(wide.get(1), {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)})
    assert_same(wide.get(0), {"w": torch.zeros(3, dtype=torch.float64)})


# ---------------------------------------------------------------------- the file


def test_the_file_is_sparse_and_has_no_name(tmp_path):
    """A hundred gigabytes of capacity; nothing is left to clean up, not even by a process that is killed."""
    states = make("disk", {"w": torch.zeros(250_000)}, 100_000, str(tmp_path))
    states.set(99_999, {"w": torch.ones(250_000)})
    assert states.get(99_999)["w"].sum() == 250_000
    assert states.most_bytes == 10**11
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_file_goes_with_the_store():
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    states = make("disk")
    assert open_files() > before
    states.move_to_disk()
    copied = copy.deepcopy(states)
    del states, copied
    assert open_files() == before


@contextlib.contextmanager
def files_up_to(size):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_more_room_is_an_error_that_says_what_to_do(tmp_path):
    """The operating system refuses to write beyond the third row, as it does when the disk is full."""
    states = make("disk", {"w": torch.zeros(1000)}, 10, str(tmp_path))

    def fill(clients):
        for client in clients:
            states.set(client, {"w": torch.full((1000,), float(client))})

    with files_up_to(3 * 4000 + 500), pytest.raises(FederationError) as error:
        fill(range(5))
    text = str(error.value)
    for part in ("File too large", str(tmp_path), "GB are free", "spill_dir", "client_state_memory_gb", "4e-05 GB"):
        assert part in text
    assert [states.written(k) for k in range(5)] == [True] * 3 + [False] * 2
    assert [float(states.get(k)["w"].sum()) for k in range(4)] == [0, 1000, 2000, 0]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FederationError, match=r"cannot be stored in .*nowhere: No such file.*spill_dir"):
        make("disk", folder=str(tmp_path / "nowhere"))


def test_more_than_any_memory():
    states = ClientStates({"w": torch.zeros(1000)}, 2**48)
    with pytest.raises(FederationError, match=r"cannot be stored in memory: .* GB.*client_state_memory_gb"):
        states.set(0, {"w": torch.zeros(1000)})


# ---------------------------------------------------------------------- the limit

GIGABYTE = 10**9


def two_stores():
    """One of 8 kB, one of 12 kB."""
    return [ClientStates({"w": torch.zeros(1000)}, 2), ClientStates({"w": torch.zeros(1000)}, 3), ClientStates({}, 3)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, False), (0.0, True), (20_000 / GIGABYTE, False), (19_999 / GIGABYTE, True), (15_000 / GIGABYTE, True)],
)
def test_all_stores_together_count(tmp_path, limit, expected):
    stores = two_stores()
    spill_to_disk(limit, stores, str(tmp_path))
    assert [store.on_disk for store in stores] == [expected, expected, False]


def test_where_large_states_are_kept_is_said_before_any_is(tmp_path, monkeypatch, caplog, recwarn):
    def said(limit, clients=10**6, free=10**14):
        caplog.clear()
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
        spill_to_disk(limit, [ClientStates({"w": torch.zeros(12_480)}, clients)], str(tmp_path))
        return caplog.text

    caplog.set_level("INFO")
    with monkeypatch.context() as patched:  # files of many gigabytes are sparse, but not on every file system
        patched.setattr(ClientStates, "move_to_disk", lambda store, folder: None)
        assert f"can grow to 49.9 GB, as they train, and is kept in files in {tmp_path}, where 1e+05 GB are" in said(
            4.0
        )
        assert "can grow to 49.9 GB, as they train, and is kept in memory" in said(None)
        assert said(4.0, clients=20_000) == ""
        assert not recwarn.list
        with pytest.warns(UserWarning, match="where 30 GB are free: not enough for all clients. Give .* a spill_dir"):
            said(4.0, free=30 * GIGABYTE)
