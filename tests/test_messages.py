"""Messages: what they hold, what they weigh, what they refuse."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from torch import Tensor

from pfl_lightning import Broadcast, ClientUpdate
from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.messages import statistics_field, weight_field

STATE = {"encoder.weight": torch.zeros(3, 2), "encoder.steps": torch.tensor(5), "head.bias": torch.zeros(4).half()}


@dataclass(frozen=True, kw_only=True)
class Rich(ClientUpdate):
    """With further content of every kind."""

    means: Tensor | None = statistics_field(default=None)
    by_name: dict[str, Tensor] | None = statistics_field(default=None)
    mask: Tensor | None = weight_field(default=None)
    note: str = "not content"


def rich(**content):
    return Rich(client=3, round=7, num_samples=10, weights=STATE, **content)


def test_bytes_by_hand():
    message = rich(means=torch.zeros(5, dtype=torch.float64), by_name={"a": torch.zeros(2)}, mask=torch.zeros(9) > 0)
    assert message.bytes_by_kind() == {"weights": 6 * 4 + 8 + 4 * 2 + 9, "statistics": 40 + 8}
    assert message.num_bytes == 49 + 48
    assert rich().bytes_by_kind() == {"weights": 40}
    assert Broadcast(client=0, round=0).num_bytes == 0


def test_content_by_name_and_kind():
    message = rich(by_name={"a": torch.zeros(2)}, means=torch.ones(1))
    assert [(name, kind) for name, kind, _ in message.tensors()] == [
        ("weights.encoder.weight", "weights"),
        ("weights.encoder.steps", "weights"),
        ("weights.head.bias", "weights"),
        ("means", "statistics"),
        ("by_name.a", "statistics"),
    ]


def test_messages_do_not_change():
    with pytest.raises(FrozenInstanceError):
        rich().client = 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_content_is_refused(bad):
    rich(means=torch.ones(3)).check_finite()
    content = torch.ones(3)
    content[1] = bad
    with pytest.raises(InvalidMessageError, match=r"client 3, round 7: Rich.by_name.a holds 1 non-finite values of 3"):
        rich(by_name={"a": content}).check_finite()


def test_states_of_other_names_or_shapes_are_refused():
    update = rich()
    update.check_like("weights", update.weights, {name: tensor + 1 for name, tensor in STATE.items()})
    with pytest.raises(InvalidMessageError, match=r"client 3, round 7: Rich.weights: missing \['x'\], unexpected \[\]"):
        update.check_like("weights", STATE, {**STATE, "x": torch.zeros(1)})
    with pytest.raises(InvalidMessageError, match=r"missing \[\], unexpected \['head.bias'\]"):
        update.check_like("weights", STATE, {name: STATE[name] for name in list(STATE)[:2]})
    with pytest.raises(InvalidMessageError, match=r"weights\['head.bias'\] has shape \(4,\), expected \(2, 2\)"):
        update.check_like("weights", STATE, {**STATE, "head.bias": torch.zeros(2, 2)})


def test_tensors_of_another_shape_are_refused():
    update = rich(means=torch.zeros(2, 3))
    update.check_shape("means", update.means, 2, 3)
    with pytest.raises(
        InvalidMessageError, match=r"round 7: Rich.means has shape \(2, 3\), expected \(3, 2\)"
    ) as caught:
        update.check_shape("means", update.means, 3, 2)
    assert (caught.value.client, caught.value.round) == (3, 7)
