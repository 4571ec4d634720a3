import pytest
import torch
from torch import nn

from pfl_lightning.encoders import build_encoder, describe_encoders, encoder_names, num_parameters, register, registry


def test_every_name_is_described_as_it_is_built():
    state = torch.get_rng_state()
    rows = {row.name: row for row in describe_encoders((1, 28, 28))}
    assert torch.equal(torch.get_rng_state(), state)
    assert tuple(rows) == encoder_names()
    for name in ("fedproto_cnn_18", "resnet18_small", "shufflenet_v2", "mlp"):
        encoder = build_encoder(name, (1, 28, 28))
        row = rows[name]
        assert row.reason is None
        assert (row.encoder, row.out_features) == (type(encoder).__name__, encoder.out_features)
        assert row.parameters == num_parameters(encoder) == sum(value.numel() for value in encoder.parameters())


def test_what_does_not_fit_says_why(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODERS", dict(registry._ENCODERS))

    @register("needy")
    class Needy(nn.Module):
        def __init__(self, input_shape, depth):
            super().__init__()

    rows = {row.name: row for row in describe_encoders((3, 8, 8))}
    assert "too small for DCPFLCNN" in rows["dcpfl_cnn1"].reason
    assert rows["dcpfl_cnn1"].parameters is rows["dcpfl_cnn1"].out_features is None
    assert "depth" in rows["needy"].reason
    assert rows["small_cnn"].reason is None


def test_a_name_with_options(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODERS", dict(registry._ENCODERS))

    def decorate(**options):
        @register("thin", **options)
        class Thin(nn.Module):
            def __init__(self, input_shape, width=3):
                super().__init__()
                self.out_features = width

        return Thin

    decorate(width=5)
    assert build_encoder("thin", (4,)).out_features == 5
    assert build_encoder("thin", (4,), width=6).out_features == 6
    with pytest.raises(TypeError, match="has no option 'wdth'; did you mean 'width'"):
        decorate(wdth=5)
