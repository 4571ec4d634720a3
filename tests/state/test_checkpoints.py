"""Damaged checkpoints are refused in one sentence, with the path and what to take instead; never half loaded."""

import errno
import os
import random
import shutil
import zipfile
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from _helpers.resume import play
from _helpers.toy import run
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning.errors import CheckpointError, DiskFullError
from pfl_lightning.methods import FedPer
from pfl_lightning.state import checkpoints as checkpoint_file
from pfl_lightning.state.checkpoints import AtomicCheckpointIO, read_checkpoint
from pfl_lightning.state.files import replace_file

METHOD = partial(FedPer, lr=0.05, epochs=1)


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory):
    """The checkpoints of a run with a plain Trainer: epoch=0.ckpt, epoch=1.ckpt and last.ckpt."""
    folder = tmp_path_factory.mktemp("run")
    play(folder, 2, METHOD)
    return folder


@pytest.fixture
def folder(two_rounds, tmp_path):
    for age, name in enumerate(("last.ckpt", "epoch=1.ckpt", "epoch=0.ckpt")):
        shutil.copy(two_rounds / name, tmp_path / name)
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    return tmp_path


def resume(path):
    return run(METHOD, 3, ckpt_path=str(path), enable_checkpointing=False)


def flip(path):
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    data[largest.header_offset + len(largest.filename) + largest.file_size // 2] ^= 1
    path.write_bytes(data)


def foreign_pickle(path):
    torch.save({"state_dict": random.Random, "pytorch-lightning_version": "2.6.0"}, path)


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "is truncated or damaged, or not a checkp"),
    "one bit": (flip, "is damaged: the checksum of its part"),
    "a picture": (lambda path: path.write_bytes(b"\x89PNG\r\n" * 1000), "or not a checkpoint"),
    "another archive": (lambda path: zipfile.ZipFile(path, "w").writestr("x", "y"), "not a checkpoint|cannot be read"),
    "a tensor": (lambda path: torch.save(torch.zeros(3), path), "is not a checkpoint of Lightning"),
    "objects": (foreign_pickle, "holds an object of random.Random, which is not loaded with weights_only=True"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_names_itself_and_the_others(folder, damage, words):
    """With a plain Trainer, which has no plugin for checkpoints."""
    path = folder / "last.ckpt"
    damage(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        resume(path)
    message = str(caught.value)
    assert message.startswith(f"the checkpoint {path} ")
    assert message.endswith(f"; the others in {folder}, the newest first, are epoch=1.ckpt, epoch=0.ckpt")
    assert "\n" not in message


def test_without_another_one_that_is_said(folder):
    for name in ("epoch=0.ckpt", "epoch=1.ckpt"):
        (folder / name).unlink()
    (folder / "last.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"is empty; there is no other in {folder}$"):
        resume(folder / "last.ckpt")


def rewritten(path, change):
    """A whole archive, of changed content."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def store(content):
    return content["state_dict"]["_extra_state"]["personal"]["stores"][0]


INCOMPLETE = {
    "round": (lambda c: c["state_dict"]["_extra_state"].pop("round"), "is incomplete: state_dict/_extra_state/round"),
    "loops": (lambda c: c.pop("loops"), "is incomplete: loops is missing"),
    "no federation": (lambda c: c["state_dict"].pop("_extra_state"), "is not of a Federation"),
}


@pytest.mark.parametrize(("change", "words"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_an_incomplete_checkpoint_is_refused_before_anything_is_loaded(folder, change, words):
    rewritten(folder / "last.ckpt", change)
    with pytest.raises(CheckpointError, match=words) as caught:
        resume(folder / "last.ckpt")
    assert str(caught.value).endswith("the newest first, are epoch=1.ckpt, epoch=0.ckpt")


def reshape_models(content):
    state = content["state_dict"]
    state.update({name: tensor[None] for name, tensor in state.items() if name.startswith("models.")})


MISSED_IN_LOADING = {
    "a row": (
        lambda c: store(c)["rows"].update({n: r[:-1] for n, r in store(c)["rows"].items()}),
        "the checkpoint is incomplete: the clients' stored .* has shape",
    ),
    "rows": (lambda c: store(c)["rows"].clear(), "the checkpoint is incomplete: .* has shape None"),
    "written": (lambda c: store(c).pop("written"), "does not fit this federation .*written"),
    "shape": (reshape_models, r"the checkpoint is of another encoder, .*: the shape of models\S+ is \(1, "),
}


@pytest.mark.parametrize(("change", "words"), MISSED_IN_LOADING.values(), ids=MISSED_IN_LOADING)
def test_what_strict_loading_misses_is_an_error(folder, change, words):
    rewritten(folder / "last.ckpt", change)
    with pytest.raises(CheckpointError, match=words):
        resume(folder / "last.ckpt")


def test_weights_alone_cannot_be_resumed(tmp_path):
    play(tmp_path, 1, METHOD, checkpoint=ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True))
    with pytest.raises(CheckpointError, match=r"holds the models alone \(save_weights_only\)"):
        resume(tmp_path / "weights.ckpt")


def test_files_of_lightnings_own_writer_are_checked_too(tmp_path):
    content = {"state_dict": {"w": torch.randn(1000)}, "pytorch-lightning_version": "2.6.0"}
    TorchCheckpointIO().save_checkpoint(content, tmp_path / "x.ckpt")
    assert torch.equal(read_checkpoint(tmp_path / "x.ckpt")["state_dict"]["w"], content["state_dict"]["w"])
    flip(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="checksum"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")


def test_every_flipped_byte_is_found_or_without_effect(tmp_path):
    path, content = tmp_path / "x.ckpt", {"state_dict": {"w": torch.arange(5.0)}, "pytorch-lightning_version": "2"}
    torch.save(content, path)
    whole, refused = path.read_bytes(), 0
    for place in random.Random(0).sample(range(len(whole)), 300):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            found = read_checkpoint(path)
            assert torch.equal(found["state_dict"]["w"], content["state_dict"]["w"])
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_checksums_are_written_even_where_torch_writes_none(tmp_path):
    content = {"state_dict": {}, "pytorch-lightning_version": "2"}
    torch.serialization.set_crc32_options(False)
    try:
        AtomicCheckpointIO().save_checkpoint(content, tmp_path / "x.ckpt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / "x.ckpt") == content


def test_a_path_that_is_not_local_is_left_to_lightning():
    content = {"state_dict": {}, "pytorch-lightning_version": "2"}
    AtomicCheckpointIO().save_checkpoint(content, "memory://run/x.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://run/x.ckpt") == content


class Plugin(TorchCheckpointIO):
    """A user's own."""


@pytest.mark.parametrize(("plugins", "kind"), [([], AtomicCheckpointIO), ([Plugin()], Plugin)])
def test_a_plain_trainer_gets_the_writer_and_a_users_plugin_stays(plugins, kind):
    federation = run(METHOD, 1, plugins=plugins)
    assert type(federation.trainer.strategy.checkpoint_io) is kind


def test_a_full_disk_says_what_the_checkpoint_needs_and_leaves_the_old_one(tmp_path, monkeypatch):
    path, plugin = tmp_path / "last.ckpt", AtomicCheckpointIO()
    plugin.save_checkpoint({"round": 1}, path)
    weights = torch.zeros(1000)

    def save(checkpoint, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(DiskFullError, match=rf"{path} cannot be written .* needs 5 B or more, and .* are free in"):
            plugin.save_checkpoint({"a": [weights], "b": {"c": weights[:2]}}, path)
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(path) == {"round": 1}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("size", [3, 3_000_000])
def test_a_device_that_is_really_full(tmp_path, monkeypatch, size):
    @contextmanager
    def on_a_full_device(path):
        with replace_file(path) as temporary:
            temporary.unlink()
            temporary.symlink_to("/dev/full")
            yield temporary

    monkeypatch.setattr(checkpoint_file, "replace_file", on_a_full_device)
    with pytest.raises(DiskFullError, match=r"last.ckpt cannot be written \(No space left on device\)"):
        AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(size)}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []
