"""Folders of images whose clients are folders."""

import pytest
from PIL import Image

from pfl_lightning.datamodules import ClientFolders


def write(root, *folders, each=6):
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(each):
            Image.new("RGB", (6, 4), (10 * number, len(folder), 0)).save(root / folder / f"{number}.png")


def make(root, tmp_path):
    return ClientFolders(str(root), validation_share=0.0, cache_dir=str(tmp_path / "cache"))


def test_clients_keep_names_and_classes_are_the_union(tmp_path):
    root = tmp_path / "all"
    write(root, "Nice/cat", "Nice/ant", "Lyon/cat", "Lyon/dog", ".hidden/cow")
    (root / ".DS_Store").write_text("")
    (root / "Nice/.DS_Store").write_text("")
    data = make(root, tmp_path)
    data.setup()
    assert (data.client_names, data.class_names) == (("Lyon", "Nice"), ("ant", "cat", "dog"))
    splits = [[data.client_data(k).train, data.client_data(k).test] for k in range(2)]
    assert [sorted({t for split in own for t in split.targets.tolist()}) for own in splits] == [[1, 2], [0, 1]]
    assert [sum(map(len, own)) for own in splits] == [12, 12]


def test_own_test_folders(tmp_path, caplog):
    root = tmp_path / "all"
    write(root, "a/train/x", "a/test/x", "b/train/x", "b/train/y", "b/test/y", "b/test/z")
    data = make(root, tmp_path)
    data.setup()
    assert [data.client_data(k).train.targets.tolist() for k in range(2)] == [[0] * 6, [0] * 6 + [1] * 6]
    assert [data.client_data(k).test.targets.tolist() for k in range(2)] == [[0] * 6, [1] * 6 + [2] * 6]
    assert data.client_data(1).test.raw_inputs[0, 1].unique().tolist() == [len("b/test/y")]
    assert "client b has test images of 'z', of which no client has training images" in caplog.text


@pytest.mark.parametrize(
    ("folders", "file", "message"),
    [
        (["a/x"], None, "has 1 client folders"),
        (["a/x", "b/x"], "notes.txt", "notes.txt is a file where a folder"),
        (["a/x", "b/x"], "b/1.png", "1.png is a file where a folder"),
        (["a/train/x", "b/x"], None, "differ in layout: a has"),
        (["a/train/x", "b/train/x", "b/x"], None, "has 'x' beside 'train'"),
    ],
)
def test_other_layouts_are_refused(tmp_path, folders, file, message):
    root = tmp_path / "all"
    write(root, *folders)
    if file:
        (root / file).write_text("")
    with pytest.raises(ValueError, match=message):
        make(root, tmp_path).setup()


def test_no_images(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder at"):
        make(tmp_path / "none", tmp_path)
    write(tmp_path / "all", "a/x", "b/x")
    write(tmp_path / "all", "c/x", each=0)
    with pytest.raises(FileNotFoundError, match="client 'c' has no training images"):
        make(tmp_path / "all", tmp_path).setup()
