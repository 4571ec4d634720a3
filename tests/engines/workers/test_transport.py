"""Messages between processes, and bytes that they share."""

import os
import pickle
import sys
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from pfl_lightning.engines.workers.packing import Packed, SharedBytes, pack, receive, send, unpack

VALUE = {"weights": torch.randn(300, 7), "few": torch.arange(3), "none": torch.zeros(0), "words": "a" * 100}


def assert_equal(found):
    assert found.keys() == VALUE.keys()
    assert found["words"] == VALUE["words"]
    assert all(torch.equal(found[name], VALUE[name]) for name in ("weights", "few", "none"))


def test_a_message_arrives():
    here, there = Pipe()
    sender = Thread(target=lambda: [send(here, VALUE), send(here, torch.ones(2_000_000)), send(here, None)])
    sender.start()
    assert_equal(receive(there))
    assert receive(there).sum() == 2_000_000
    assert receive(there) is None
    sender.join()
    here.close()
    with pytest.raises(EOFError):
        receive(there)


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "file"])
def test_shared_bytes(memory, monkeypatch):
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    shared = SharedBytes.of(pack(VALUE))
    other = pickle.loads(pickle.dumps(shared))
    assert other._file is None
    packed = other.load()
    assert all(buffer.ctypes.data % 64 == 0 for buffer in packed.buffers)
    found = unpack(packed, copy=False)
    assert_equal(found)
    found["weights"].zero_()  # in this process only
    assert_equal(unpack(other.load(), copy=False))
    shared.close()
    assert not found["weights"].any()
    if not memory:
        assert not Path(shared.path).exists()


def test_shared_bytes_of_nothing():
    shared = SharedBytes.of(Packed(b"", (np.zeros(0, dtype=np.uint8),)))
    found = shared.load()
    assert found.content == b""
    assert [buffer.size for buffer in found.buffers] == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_shared_memory_is_released():
    before = set(os.listdir("/proc/self/fd"))
    shared = SharedBytes.of(pack(torch.ones(1000)))
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    del shared
    assert not set(os.listdir("/proc/self/fd")) - before
