"""Folders of domains: their order, their classes, and what is said when something is wrong with them."""

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from PIL import Image

from pfl_lightning.datamodules import (
    DOMAINNET_10,
    IID,
    DirichletOverClients,
    DomainFolders,
    Domains,
    FederatedDataModule,
    FromFile,
    PartitionError,
    Samples,
)
from pfl_lightning.datamodules.datasets import images

DOMAINS = ("sketch", "art", "photo")


def write_image(path, value, size=(5, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value // 2, 255 - value)).save(path)


def write_domains(root, domains=DOMAINS, classes=("dog", "cat"), each=10):
    """Pictures whose red value is 100 times the domain's place plus the number within the domain."""
    for place, domain in enumerate(sorted(domains)):
        for label, name in enumerate(sorted(classes)):
            for number in range(each):
                write_image(root / domain / name / f"{number:02d}.png", 80 * place + each * label + number)
    return root


@pytest.fixture
def folder(tmp_path):
    return write_domains(tmp_path / "pictures")


def make(folder, tmp_path, rule=None, **options):
    rule = IID(2) if rule is None else rule
    return DomainFolders(rule, 4, root=str(folder), cache_dir=str(tmp_path / "cache"), **options)


def ready(*args, **options):
    data = make(*args, **options)
    data.setup()
    return data


def test_domains_then_classes_then_files(folder, tmp_path):
    (folder / "art" / "dog" / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    samples = make(folder, tmp_path).load()
    assert samples.class_names == ("cat", "dog")
    assert samples.domain_names == ("art", "photo", "sketch")
    assert samples.train_targets.tolist() == ([0] * 10 + [1] * 10) * 3
    assert samples.train_domains.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert samples.train_inputs[:, 0, 0, 0].tolist() == [80 * d + k for d in range(3) for k in range(20)]
    assert samples.test_inputs is None


def test_domains_come_in_the_order_given(folder, tmp_path):
    samples = make(folder, tmp_path, domains=["sketch", "art"]).load()
    assert samples.domain_names == ("sketch", "art")
    assert samples.train_inputs[[0, 20], 0, 0, 0].tolist() == [160, 0]
    data = ready(folder, tmp_path, Domains(2, 5), domains=["sketch", "art"])
    assert data.client_groups == ["sketch", "art"]
    assert (data.client_data(0).train.raw_inputs[:, 0] >= 160).all()


def test_a_choice_of_classes(folder, tmp_path):
    write_image(folder / "art" / "zebra" / "0.png", 7)
    (folder / "photo" / "empty").mkdir()
    samples = make(folder, tmp_path, classes=["dog"]).load()
    assert samples.class_names == ("dog",)
    assert samples.train_inputs[:10, 0, 0, 0].tolist() == list(range(10, 20))
    assert make(folder, tmp_path, classes=["dog", "cat"]).load().class_names == ("cat", "dog")


def test_the_ten_classes_of_domainnet(tmp_path):
    write_domains(tmp_path / "net", ("clipart", "real"), (*DOMAINNET_10, "aircraft", "zigzag"), each=1)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    start = ["--data=pfl_lightning.datamodules.DomainFolders", "--data.root=net"]
    start += ["--data.partition=pfl_lightning.datamodules.Domains", "--data.partition.num_clients=2"]
    for given, names in (("domainnet10", DOMAINNET_10), ("[zigzag, bird]", ("bird", "zigzag"))):
        options = parser.parse_args([*start, f"--data.classes={given}"]).data.init_args
        samples = make(tmp_path / "net", tmp_path, classes=options.classes).load()
        assert samples.class_names == names
        assert len(samples.train_targets) == 2 * len(names)
    with pytest.raises(ValueError, match=r"a list of different names, .*got 'domainnet'"):
        make(tmp_path / "net", tmp_path, classes="domainnet")


def test_every_choice_has_a_separate_cache(folder, tmp_path, monkeypatch, recwarn):
    decoded = []
    original = images.decode_image
    monkeypatch.setattr(images, "decode_image", lambda path, *rest: decoded.append(path) or original(path, *rest))
    choices = ({}, {"domains": ["art"]}, {"domains": ["photo", "art"]}, {"classes": ["dog"]}, {"image_size": 3})
    first = [make(folder, tmp_path, **choice).load() for choice in choices]
    assert len(decoded) > 0
    decoded.clear()
    second = [make(folder, tmp_path, **choice).load() for choice in choices]
    assert decoded == []
    assert all(torch.equal(one.train_inputs, two.train_inputs) for one, two in zip(first, second, strict=True))
    assert not [warning for warning in recwarn if "changed" in str(warning.message)]


def test_a_domain_with_other_classes_is_named(folder, tmp_path):
    write_image(folder / "photo" / "eel" / "0.png", 1)
    with pytest.raises(ValueError, match=r"domain 'photo' .*missing none, extra eel; set 'classes' .*\(cat, dog\)"):
        make(folder, tmp_path).load()
    for file in (folder / "photo" / "dog").iterdir():
        file.unlink()
    (folder / "photo" / "dog").rmdir()
    with pytest.raises(ValueError, match=r"domain 'photo' .*missing dog, extra eel; set 'classes' .*\(cat\)"):
        make(folder, tmp_path).load()
    with pytest.raises(ValueError, match=r"domain 'photo' .*than those asked for: missing dog, extra none"):
        make(folder, tmp_path, classes=["cat", "dog"]).load()
    assert make(folder, tmp_path, classes=["cat"]).load().class_names == ("cat",)
    with pytest.raises(ValueError, match=r"domain 'art' .*missing emu, fox, extra none; set 'classes' .*\(cat\)"):
        make(folder, tmp_path, classes=["emu", "fox"]).load()
    write_image(tmp_path / "apart" / "one" / "ape" / "0.png", 0)
    write_image(tmp_path / "apart" / "two" / "bee" / "0.png", 0)
    with pytest.raises(ValueError, match=r"domain 'one' .*extra ape; set 'classes' .* or 'domains' to folders"):
        make(tmp_path / "apart", tmp_path).load()


def test_what_is_wrong_with_a_folder_is_named(folder, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no domain folders in .*nowhere', which has none.*<root>/<domain>/<class>/<image>"
    ):
        make(tmp_path / "nowhere", tmp_path).load()
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match="no domain folders in"):
        make(tmp_path / "bare", tmp_path).load()
    with pytest.raises(
        FileNotFoundError, match=r"no domain 'clipart' in .*which has art, photo, sketch: .*correct 'domains'"
    ):
        make(folder, tmp_path, domains=["art", "clipart"]).load()
    with pytest.raises(FileNotFoundError, match=r"no class folders in .*cat: expected"):
        make(folder / "art", tmp_path).load()
    (folder / "art" / "eel").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no images in the class folder .*eel"):
        make(folder, tmp_path, domains=["art"]).load()
    (folder / "art" / "eel").rmdir()
    write_image(folder / "photo" / "cat" / "wide.png", 3, (9, 5))
    with pytest.raises(ValueError, match=r"differ in size: .* is 5 x 5, .*wide\.png is 9 x 5 .*set image_size"):
        make(folder, tmp_path).load()
    assert make(folder, tmp_path, image_size=6).load().train_inputs.shape == (61, 3, 6, 6)
    for wrong in ({"domains": []}, {"domains": ["art", "art"]}, {"classes": ["cat", "cat"]}):
        with pytest.raises(ValueError, match="must be a list of different names, at least one"):
            make(folder, tmp_path, **wrong)
    with pytest.raises(ValueError, match="image_size must be at least 1"):
        make(folder, tmp_path, image_size=0)


def test_the_rest_of_a_domain_is_its_clients_test_split(folder, tmp_path):
    data = ready(folder, tmp_path, Domains(3, 12), validation_share=0.0)
    assert [len(data.client_data(client).train) for client in range(3)] == [12] * 3
    assert data.client_groups == ["art", "photo", "sketch"]
    assert data.class_counts().sum(axis=1).tolist() == [12] * 3
    for client in range(3):
        own = data.client_data(client)
        whole = torch.cat([own.train.indices, own.test.indices]).sort().values
        assert whole.tolist() == list(range(20 * client, 20 * client + 20))


def test_validation_tests_and_statistics(folder, tmp_path):
    data = ready(folder, tmp_path, Domains(3, 12), validation_share=0.25, test_samples_per_client=5)
    held = []
    for client in range(3):
        own = data.client_data(client)
        assert [len(part) for part in (own.train, own.validation, own.test)] == [9, 3, 5]
        held += [own.train.raw_inputs, own.validation.raw_inputs]
    seen = torch.cat(held).double() / 255
    assert data.transform.mean == pytest.approx(seen.mean((0, 2, 3)).tolist(), abs=1e-12)
    other = ready(folder, tmp_path, Domains(3, 12), validation_share=0.0, test_share=0.9)
    whole = ready(folder, tmp_path, Domains(3, 12), validation_share=0.0)
    assert other.fingerprint == whole.fingerprint != data.fingerprint


@pytest.mark.parametrize("ending", [".npz", ".json"])
def test_a_division_by_domains_is_replayed_from_a_file(folder, tmp_path, ending):
    data = ready(folder, tmp_path, Domains(6, 5, seed=2), validation_share=0.2)
    data.save_partition(tmp_path / f"partition{ending}")
    again = ready(folder, tmp_path, FromFile(str(tmp_path / f"partition{ending}")), seed=5)
    assert again.fingerprint == data.fingerprint
    assert again.transform == data.transform
    assert again.client_groups == data.client_groups == ["art", "art", "photo", "photo", "sketch", "sketch"]


@pytest.mark.parametrize("rule", [IID(4), DirichletOverClients(4, 0.5, min_samples=2)])
def test_other_rules_divide_all_images_whatever_their_domain(folder, tmp_path, rule):
    data = ready(folder, tmp_path, rule, validation_share=0.0, test_share=0.25)
    assert sum(len(data.client_data(client).train) for client in range(data.num_clients)) == 45
    assert data.client_groups is None
    trained = np.concatenate([data.client_data(k).train.indices.numpy() for k in range(4)])
    tested = np.concatenate([data.client_data(k).test.indices.numpy() for k in range(4)])
    assert not np.intersect1d(trained, tested).size


def test_samples_check_their_domains():
    inputs, targets = torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"int64, one for each of 3 samples, .*got tensor\(\[0, 0\]\)"):
        Samples(inputs, targets, ("a",), train_domains=targets[:2], domain_names=("d",))
    with pytest.raises(ValueError, match=r"below the number of domain_names, 0, got tensor\(\[0, 0, 0\]\)"):
        Samples(inputs, targets, ("a",), train_domains=targets)


def test_numbers_of_clients_that_do_not_fit_the_domains_are_refused(folder, tmp_path):
    with pytest.raises(PartitionError, match=r"num_clients is 4, the data have 3 domains \(art, photo, sketch\): set"):
        ready(folder, tmp_path, Domains(4))
