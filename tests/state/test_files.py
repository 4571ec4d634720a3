"""Files are written whole or not at all; a full disk is named with what is needed and what is free."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pfl_lightning.errors import DiskFullError, FederationError
from pfl_lightning.state.files import explain_full_disk, replace_file


def write(path, error):
    with replace_file(path) as temporary:
        temporary.write_text("half")
        raise error


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_path_needed_and_free_space_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")
    needs = rf"{path} cannot be written \(No space left on device\): it needs 5 B or more, and \S+ .B are free in"
    with pytest.raises(DiskFullError, match=needs):
        write(path, no_space())
    assert [found.name for found in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_device_that_is_really_full(tmp_path):
    path = tmp_path / "clients.csv"

    def write_there():
        with replace_file(path) as temporary:
            temporary.unlink()
            temporary.symlink_to("/dev/full")
            temporary.write_text("client,accuracy\n")

    with pytest.raises(DiskFullError, match=r"clients\.csv cannot be written"):
        write_there()
    assert list(tmp_path.iterdir()) == []
    assert os.path.exists("/dev/full")


def test_the_error_is_found_behind_that_of_a_writer(tmp_path):
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__cause__ = no_space()
    with pytest.raises(DiskFullError, match="free in"), explain_full_disk(tmp_path / "not" / "there"):
        raise error


@pytest.mark.parametrize("lasting", [True, False])
def test_what_need_not_outlast_a_loss_of_power_does_not_wait_for_the_disk(tmp_path, monkeypatch, lasting):
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)
    with replace_file(tmp_path / "progress.json", lasting=lasting) as temporary:
        temporary.write_text("{}")
    assert (tmp_path / "progress.json").read_text() == "{}"
    assert len(waited) is int(lasting)


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("place", [".results.json.tmp", "results.json"])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path, place, dangling):
    (tmp_path / "run").mkdir()
    elsewhere = tmp_path / "thesis.tex"
    if not dangling:
        elsewhere.write_text("two years of work")
    (tmp_path / "run" / place).symlink_to(elsewhere)
    with replace_file(tmp_path / "run" / "results.json") as temporary:
        temporary.write_text("{}")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["results.json"]
    assert not (tmp_path / "run" / "results.json").is_symlink()
    assert elsewhere.exists() != dangling
    assert dangling or elsewhere.read_text() == "two years of work"


def test_a_file_has_the_rights_that_others_have(tmp_path):
    with replace_file(tmp_path / "made") as temporary:
        temporary.write_text("")
    (tmp_path / "usual").write_text("")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_errors_in_a_ring_end_the_search(tmp_path, length, link):
    """A writer that keeps its error and raises it again comes to stand in its own context."""
    ring = [RuntimeError(f"error {number}") for number in range(length)]
    for number, error in enumerate(ring):
        setattr(error, link, ring[(number + 1) % length])
    with pytest.raises(RuntimeError, match="error 0"), explain_full_disk(tmp_path):
        raise ring[0]
    outside = RuntimeError("outside of the ring")
    setattr(outside, link, ring[0])
    with pytest.raises(RuntimeError, match="outside"), explain_full_disk(tmp_path):
        raise outside


def test_an_error_that_says_what_to_do_is_not_replaced(tmp_path):
    error = FederationError("the clients' state cannot be stored in /scratch")
    error.__cause__ = no_space()
    with pytest.raises(FederationError, match="cannot be stored in /scratch"), explain_full_disk(tmp_path):
        raise error


def test_the_innermost_path_counts(tmp_path):
    with pytest.raises(DiskFullError, match="clients cannot be written"), explain_full_disk(tmp_path):
        write(tmp_path / "clients", no_space())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EACCES, "no"), RuntimeError("something else")])
def test_other_errors_stay_what_they_are_and_leave_no_half_file(tmp_path, error):
    with pytest.raises(type(error)):
        write(tmp_path / "x", error)
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_one_file_do_not_take_each_others(tmp_path):
    """As two searches of one folder do; each leaves its own content whole, and nothing else."""
    path = tmp_path / "search.json"
    with ThreadPoolExecutor(2) as threads, replace_file(path, shared=True) as mine:
        mine.write_text("first")

        def other():
            with replace_file(path, shared=True) as temporary:
                temporary.write_text("second")

        threads.submit(other).result()
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
