"""Folders of images whose clients are folders."""

import pytest
import yaml
from PIL import Image

from pfl_lightning.cli import main
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
    assert "client b has test images of 'z', for which no client has training images" in caplog.text


@pytest.mark.parametrize(
    ("folders", "file", "message"),
    [
        (["a/x"], None, "has 1 client folders"),
        (["a/x", "b/x"], "notes.txt", "notes.txt is a file where a folder"),
        (["a/x", "b/x"], "b/1.png", "1.png is a file where a folder"),
        (["a/train/x", "b/x"], None, "differ in layout: a has"),
        (["a/train/x", "b/train/x", "b/x"], None, "has 'x' next to 'train'"),
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


def test_split_folders_without_test_images_are_not_silent(tmp_path):
    root = tmp_path / "all"
    write(root, "Lyon/train/x", "Lyon/test/x", "Nice/train/x", "Nice/train/y")
    data = make(root, tmp_path)
    with pytest.warns(UserWarning, match=r"client\(s\) 1 \(Nice\) have no test samples \(1 of 2\)"):
        data.setup()
    assert [len(data.client_data(k).test) for k in range(2)] == [6, 0]


def test_a_share_is_held_out_where_no_client_has_test_images(tmp_path):
    root = tmp_path / "all"
    write(root, "Lyon/train/x", "Nice/train/x", "Nice/train/y")
    write(root, "Lyon/test/x", each=0)
    data = make(root, tmp_path)
    with pytest.warns(UserWarning, match=r"no client in .*all has images in a folder 'test'.* share of 0.25"):
        data.setup()
    assert [len(data.client_data(k).test) for k in range(2)] == [2, 3]


def test_split_folders_without_training_images(tmp_path):
    root = tmp_path / "all"
    write(root, "Lyon/train/x", "Lyon/test/x", "Nice/test/x")
    with pytest.raises(FileNotFoundError, match=r"client 'Nice' has no training images: expected .*Nice/train/<class>"):
        make(root, tmp_path).setup()


def test_a_config_from_fit_to_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [f"{part}/{label}" for part in ("train", "test") for label in "xy"]
    write(tmp_path / "photos", *(f"{name}/{folder}" for name in ("Lyon", "Metz", "Nice") for folder in folders))
    options = {"root": "photos", "novel_clients": 1, "cache_dir": "cache", "image_size": 8}
    config = {
        "run_dir": "run",
        "model": {"method": "FedPer", "encoder": "mlp", "seed": 0},
        "data": {"class_path": "ClientFolders", "init_args": options},
        "trainer": {"max_epochs": 1, "accelerator": "cpu"},
    }
    (tmp_path / "photos.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "photos.yaml"])
    last = ["--config", "photos.yaml", "--ckpt_path", "last"]
    main(["fit", *last, "--trainer.max_epochs", "2"])
    rows = (tmp_path / "run/version_0/clients.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["name", "Lyon", "Metz", "Nice"]
    main(["export", *last, "--output", "models"])
    main(["predict", *last, "--client", "Nice", "--inputs", "photos/Nice/test/x"])
    main(["predict", "--exported", "models/client_2.pt", "--inputs", "photos/Nice/test/x"])
    own, exported = (tmp_path / folder for folder in ("run/version_0/predictions", "predictions"))
    assert (own / "client_2_x.csv").read_text() == (exported / "client_2_x.csv").read_text()
