import pickle
from functools import partial

import pytest
import torch
import torchvision

from pfl_lightning.encoders import GoogLeNet, ResNet18, ShuffleNetV2


@pytest.fixture(scope="module")
def state():
    return torchvision.models.resnet18().state_dict()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "weights.pth"


def test_an_absent_file(tmp_path):
    for encoder, name in [
        (ResNet18, "resnet18-f37072fd.pth"),
        (ShuffleNetV2, "shufflenetv2_x1-5666bf0f80.pth"),
        (GoogLeNet, "googlenet-1378be20.pth"),
    ]:
        said = rf"absent\.pth, where .*Nothing is downloaded: put .*{name} or a model of"
        with pytest.raises(FileNotFoundError, match=said):
            encoder((3, 32, 32), weights=str(tmp_path / "absent.pth"))


def test_torchvisions_names_of_the_files():
    for encoder, weights in [
        ("resnet18-f37072fd.pth", torchvision.models.ResNet18_Weights.IMAGENET1K_V1),
        ("shufflenetv2_x1-5666bf0f80.pth", torchvision.models.ShuffleNet_V2_X1_0_Weights.IMAGENET1K_V1),
        ("googlenet-1378be20.pth", torchvision.models.GoogLeNet_Weights.IMAGENET1K_V1),
    ]:
        assert weights.url.endswith(f"/{encoder}")


def test_the_home_directory(state, file, monkeypatch):
    torch.save(state, file)
    monkeypatch.setenv("HOME", str(file.parent))
    assert torch.equal(ResNet18((3, 32, 32), weights="~/weights.pth").bn1.weight, state["bn1.weight"])


@pytest.mark.parametrize("encoder", [ShuffleNetV2, GoogLeNet, partial(ResNet18, out_features=32)])
def test_a_clients_model_has_the_layer_of_features(encoder, file):
    own = encoder((3, 32, 32))
    state = {f"encoder.{name}": value for name, value in own.state_dict().items()}
    torch.save({**state, "head.weight": torch.zeros(10, own.out_features), "head.bias": torch.zeros(10)}, file)
    loaded = encoder((3, 32, 32), weights=str(file))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in own.state_dict().items())


def test_weights_of_another_network(file):
    torch.save(torchvision.models.shufflenet_v2_x1_0().state_dict(), file)
    with pytest.raises(ValueError, match=r"do not fit ResNet18.*conv1\.weight, bn1\.weight.*missing.*unexpected"):
        ResNet18((3, 32, 32), weights=str(file))


def test_a_deeper_network_and_a_missing_stage(state, file):
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"layer1\.1\.conv1\.weight, .* \(\d+\) unexpected$"):
        ResNet18((3, 32, 32), layers=(1, 1, 1, 1), weights=str(file))
    with pytest.raises(ValueError, match=r"3 channels or 1\): layer1\.0\.downsample\.0\.weight, .* missing$"):
        ResNet18((3, 32, 32), strides=(2, 2, 2, 2), weights=str(file))


def test_misshapen_weights(state, file):
    torch.save({**state, "bn1.bias": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"(?s)size mismatch for bn1.bias"):
        ResNet18((3, 32, 32), weights=str(file))


def test_channels_that_no_file_is_for(state, file):
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"(?s)ResNet18 for 2 channels.*size mismatch for conv1.weight"):
        ResNet18((2, 32, 32), weights=str(file))


def test_torchvisions_weights_do_not_fit_the_small_stem(state, file):
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"(?s)size mismatch for conv1.weight"):
        ResNet18((3, 32, 32), stem="small", weights=str(file))


@pytest.mark.parametrize(
    ("prefix", "beside"),
    [("encoder.", "head.weight"), ("encoder.encoder.", "encoder.projector.weight"), ("", "fc.bias")],
)
def test_a_clients_model_gives_its_encoder(prefix, beside, file):
    small = {"stem": "small", "layers": (1, 1, 1, 1)}
    torch.manual_seed(0)
    source = ResNet18((3, 32, 32), **small)
    model = {f"{prefix}{name}": value for name, value in source.state_dict().items()}
    torch.save({**model, beside: torch.ones(10)}, file)
    loaded = ResNet18((3, 32, 32), **small, weights=str(file))
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    with pytest.raises(ValueError, match=r"(?s)do not fit ResNet18.* expected a file of `pfl export`, or"):
        ResNet18((3, 32, 32), weights=str(file))


def test_old_files_count_no_batches(state, file):
    torch.save({name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}, file)
    assert ResNet18((3, 32, 32), weights=str(file)).bn1.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {"a": 1}, "epoch": 3}, "does not map names to tensors: save network.state_dict"),
        ([1, 2], "does not map names to tensors"),
        (torchvision.models.resnet.BasicBlock(4, 4), "cannot be read by torch.load"),
    ],
)
def test_no_state_dict(content, message, file):
    torch.save(content, file)
    with pytest.raises(ValueError, match=message):
        ResNet18((3, 32, 32), weights=str(file))


@pytest.mark.parametrize("content", [b"", b"no weights", pickle.dumps(print, protocol=2)])
def test_no_torch_file(content, file):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"expects a state dict of torchvision such as .*cannot be read"):
        ShuffleNetV2((3, 32, 32), weights=str(file))
