"""pFedHN: the size of its hypernetwork, and arguments that are refused."""

import pytest
import torch
from _helpers.toy import CLASSES, tiny_encoder

from pfl_lightning.methods import PFedHN, pfedhn
from pfl_lightning.methods.pfedhn import Hypernetwork


def test_its_size_is_known_before_it_is_built():
    shapes = {"a.weight": torch.Size([3, 5]), "a.bias": torch.Size([3])}
    network = Hypernetwork(9, 4, 6, 2, shapes)
    assert Hypernetwork.size(9, 4, 6, 2, 18) == sum(p.numel() for p in network.parameters())


def test_its_size_is_logged_before_it_is_built(monkeypatch):
    order, build = [], Hypernetwork.__init__

    def noted(self, *sizes):
        order.append("built")
        build(self, *sizes)

    monkeypatch.setattr(pfedhn, "rank_zero_info", order.append)
    monkeypatch.setattr(Hypernetwork, "__init__", noted)
    server = PFedHN(tiny_encoder((6,)), CLASSES).configure_aggregator(5)
    said, built = order
    assert built == "built"
    number = sum(p.numel() for p in server.learner.network.parameters())
    assert said.startswith("The hypernetwork that generates ")
    assert f" has {number:,} parameters" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "shared"}, "generates parameters and no running statistics; use 'own'"),
        ({"server_steps": "epoch"}, "server_steps must be one of"),
        ({"server_lr": 0.0}, "server_lr must be a finite number above 0"),
        ({"server_clip": -1.0}, "server_clip must be"),
        ({"server_momentum": -0.1}, "server_momentum must be"),
        ({"embedding_size": 0}, "embedding_size must be"),
        ({"hidden_size": 0}, "hidden_size must be"),
        ({"hidden_layers": -1}, "hidden_layers must be"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PFedHN(tiny_encoder((6,)), CLASSES, **options)
