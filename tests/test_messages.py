"""Messages: what they hold, what they weigh, what they refuse."""

from dataclasses import FrozenInstanceError, dataclass, fields

import numpy as np
import pytest
import torch
from _helpers.toy import for_toy, run, tiny_encoder
from torch import Tensor

from pfl_lightning import Aggregator, Broadcast, ClientUpdate, SequentialEngine, VectorizedEngine, messages
from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.messages import statistics_field, weight_field
from pfl_lightning.methods import METHODS, FedAvg, FedPAC

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


# ---------------------------------------------------------------------- declarations


@dataclass(frozen=True, kw_only=True)
class Declared(ClientUpdate):
    """A field of every kind of declaration."""

    classes: Tensor = statistics_field(shape="K", dtype=torch.int64, at_least=0, below="C", ascending=True)
    means: Tensor = statistics_field(shape="K d")
    full: Tensor | None = statistics_field(shape="C 3", floating=True, when="wanted")
    counts: Tensor | None = statistics_field(shape="K", dtype=torch.int64, total="num_samples", default=None)
    spread: Tensor | None = statistics_field(shape="", at_least=0, default=None)
    by_name: dict[str, Tensor] | None = statistics_field(default=None)


class Server(Aggregator):
    """Takes such updates, of three classes and two features."""

    update_class = Declared

    def __init__(self, wanted=True):
        client = FedAvg(tiny_encoder((6,)), 3)
        super().__init__(client, 5)
        self.sizes = {"C": 3, "d": 2}
        self.expected_weights = {name: tensor.to("meta") for name, tensor in STATE.items()}
        self.wanted = wanted

    def broadcast(self, client, round):
        """Nothing that an update could repeat."""
        return Broadcast(client=client, round=round)


def declared(update_class=Declared, **changes):
    content = {
        "classes": torch.tensor([0, 2]),
        "means": torch.ones(2, 2),
        "full": torch.ones(3, 3),
        "spread": torch.tensor(0.0),
        "by_name": {"a": torch.ones(4)},
    }
    return update_class(**{"client": 3, "round": 7, "num_samples": 10, "weights": STATE, **content, **changes})


def refusal(update, wanted=True):
    """Return why a server refuses an update; ``None`` if it takes it."""
    try:
        Server(wanted).check(update)
    except InvalidMessageError as error:
        return str(error)
    return None


def test_an_update_as_declared_passes():
    one = torch.tensor([1])
    assert refusal(declared()) is None
    assert refusal(declared(spread=None, by_name=None)) is None
    assert refusal(declared(full=None), wanted=False) is None
    assert refusal(declared(full=None)) is not None
    assert refusal(declared(classes=one, means=torch.ones(1, 2))) is None  # K is another size in each message


def poisoned(shape, value):
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = value
    return tensor


BAD = {
    "nan": ({"means": poisoned((2, 2), float("nan"))}, "Declared.means holds 1 non-finite values of 4; lower the"),
    "infinity": ({"full": poisoned((3, 3), float("inf"))}, "Declared.full holds 1 non-finite values of 9"),
    "minus infinity": ({"spread": torch.tensor(-float("inf"))}, "Declared.spread holds 1 non-finite values of 1"),
    "nan by name": ({"by_name": {"a": poisoned(4, float("nan"))}}, "Declared.by_name.a holds 1 non-finite"),
    "nan in weights": (
        {"weights": {**STATE, "encoder.weight": poisoned((3, 2), float("nan"))}},
        "Declared.weights.encoder.weight holds 1 non-finite values of 6",
    ),
    "width": ({"means": torch.ones(2, 3)}, r"Declared.means has shape \(2, 3\), expected \(2, 2\)"),
    "rows": ({"means": torch.ones(3, 2)}, r"Declared.means has shape \(3, 2\), expected \(2, 2\)"),
    "dimensions": ({"classes": torch.tensor([[0, 2]])}, r"Declared.classes has shape \(1, 2\), expected \(K,\)"),
    "number": ({"full": torch.ones(3, 4)}, r"Declared.full has shape \(3, 4\), expected \(3, 3\)"),
    "no scalar": ({"spread": torch.ones(1)}, r"Declared.spread has shape \(1,\), expected \(\)"),
    "dtype": ({"classes": torch.tensor([0, 2]).int()}, "Declared.classes has dtype torch.int32, expected torch.int64"),
    "order": (
        {"classes": torch.tensor([2, 0])},
        r"classes is \[2, 0\], expected ascending numbers, at least 0, below 3",
    ),
    "twice": ({"classes": torch.tensor([2, 2])}, r"classes is \[2, 2\], expected ascending"),
    "too large": ({"classes": torch.tensor([0, 3])}, r"classes is \[0, 3\], expected ascending numbers, .* below 3"),
    "negative": ({"classes": torch.tensor([-1, 0])}, r"classes is \[-1, 0\]"),
    "empty": ({"classes": torch.ones(0).long(), "means": torch.ones(0, 2)}, r"classes is \[\], expected ascending"),
    "below zero": ({"spread": torch.tensor(-0.5)}, "Declared.spread is -0.5, expected at least 0"),
    "above the sum": (
        {"counts": torch.tensor([4, 7])},
        r"counts is \[4, 7\], expected numbers that add up to num_samples",
    ),
    "whole numbers": ({"full": torch.ones(3, 3).long()}, "full has dtype torch.int64, expected a floating-point one"),
    "truth values": ({"full": torch.ones(3, 3) > 0}, "full has dtype torch.bool, expected a floating-point one"),
    "absurd": (
        {"means": poisoned((2, 2), 1e30)},
        r"means holds values of up to 1\.0e\+30, expected at most 1e\+12; lower",
    ),
    "minus absurd": (
        {"means": poisoned((2, 2), -1e18)},
        r"means holds values of up to 1\.0e\+18, expected at most 1e\+12",
    ),
    "absurd by name": ({"by_name": {"a": poisoned(4, 1e18)}}, r"by_name.a holds values of up to 1\.0e\+18"),
    "sparse": (
        {"means": torch.ones(2, 2).to_sparse()},
        "means is a tensor of the kind torch.sparse_coo, expected a dense",
    ),
    "meta": ({"means": torch.ones(2, 2, device="meta")}, "means is a tensor of the kind meta, expected a dense one"),
    "no tensor": ({"means": [[1.0, 1.0]] * 2}, "means is a list, expected a tensor"),
    "no tensor by name": ({"by_name": {"a": 3.0}}, "by_name.a is a float, expected a tensor"),
    "complex nan": ({"by_name": {"a": poisoned(4, float("nan")) * 1j}}, "by_name.a holds 1 non-finite values"),
    "missing": ({"full": None}, "Declared.full is missing"),
    "always missing": ({"means": None}, "Declared.means is missing"),
    "no samples": ({"num_samples": 0}, "num_samples is 0, expected at least 1"),
    "fewer weights": (
        {"weights": {"head.bias": STATE["head.bias"]}},
        r"Declared.weights: missing \['encoder.steps', 'encoder.weight'\], unexpected \[\]",
    ),
    "more weights": (
        {"weights": {**STATE, "x": torch.ones(1)}},
        r"Declared.weights: missing \[\], unexpected \['x'\]",
    ),
    "no names": ({"weights": None}, "Declared.weights is a NoneType, expected names to tensors"),
    "a list of weights": ({"weights": [1.0]}, "Declared.weights is a list, expected names to tensors"),
    "weights that are no tensors": (
        {"weights": {**STATE, "head.bias": [0.0] * 4}},
        r"Declared.weights\['head.bias'\] is a list, expected a tensor",
    ),
    "dtype of weights": (
        {"weights": {**STATE, "encoder.weight": torch.zeros(3, 2).long()}},
        r"weights\['encoder.weight'\] has dtype torch.int64, expected torch.float32",
    ),
    "sparse weights": (
        {"weights": {**STATE, "encoder.weight": torch.zeros(3, 2).to_sparse()}},
        "weights.encoder.weight is a tensor of the kind torch.sparse_coo, expected a dense one",
    ),
    "absurd weights": (
        {"weights": {**STATE, "encoder.weight": poisoned((3, 2), 1e30)}},
        r"weights.encoder.weight holds values of up to 1.0e\+30, expected at most 1e\+12",
    ),
    "shape of weights": (
        {"weights": {**STATE, "head.bias": torch.ones(2, 2)}},
        r"Declared.weights\['head.bias'\] has shape \(2, 2\), expected \(4,\)",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), BAD.values(), ids=BAD)
def test_an_update_that_differs_from_its_declaration_is_refused(changes, reason):
    with pytest.raises(InvalidMessageError, match=f"client 3, round 8: .*{reason}") as caught:
        Server().check(declared(**changes))
    assert (caught.value.client, caught.value.round) == (3, 7)


NUMBERS = [float("nan"), float("inf"), 10.0, 10**400, 10**5000, 10**13, -3, "ten", None, True, torch.tensor(3), [3]]


@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
def test_a_number_of_samples_that_is_none_is_refused(number):
    with pytest.raises(InvalidMessageError, match=r"client 3, round 8: num_samples is .*, expected at least 1"):
        Server().check(declared(num_samples=number))


def test_numbers_of_samples_of_numpy_pass():
    assert refusal(declared(num_samples=np.int64(10))) is None


def test_what_the_server_sent_may_come_back_however_large():
    """The mask of an attention, say, which is part of the model's state."""

    class Masked(Server):
        def broadcast(self, client, round):
            return Broadcast(client=client, round=round, weights={"encoder.weight": poisoned((3, 2), -3e38)})

    Masked().check(declared(weights={**STATE, "encoder.weight": poisoned((3, 2), -3e38)}))
    with pytest.raises(InvalidMessageError, match=r"head.bias holds 1 non-finite"):
        Masked().check(declared(weights={**STATE, "head.bias": poisoned(4, float("inf")).half()}))


def test_weights_may_be_expected_by_their_shapes_alone():
    server = Server()
    server.expected_weights = {name: tensor.shape for name, tensor in STATE.items()}
    server.check(declared(weights={**STATE, "head.bias": torch.zeros(4)}))
    with pytest.raises(InvalidMessageError, match=r"head\.bias"):
        server.check(declared(weights={**STATE, "head.bias": torch.zeros(5)}))


def test_a_field_that_the_server_does_not_want_is_refused():
    with pytest.raises(InvalidMessageError, match=r"client 3, round 8: Declared\.full is not expected"):
        Server(wanted=False).check(declared())


def test_an_update_of_another_class_is_refused():
    """A method whose client sends more, and whose server does not know of it."""

    @dataclass(frozen=True, kw_only=True)
    class More(Declared):
        further: Tensor | None = statistics_field(default=None)

    with pytest.raises(
        InvalidMessageError, match=r"Server expects updates of Declared, got More; .* sets update_class = More"
    ):
        Server().check(declared(More))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": ("C", "d")}, "shape of a message field must be a string, got "),
        ({"below": 1.0}, "below of a message field must be a string, got 1.0"),
        ({"at_least": "0"}, "at_least of a message field must be a number, got '0'"),
        (
            {"at_most": 1},
            "a message field has no option 'at_most': known are shape, dtype, .* of a dataclass",
        ),
    ],
)
def test_declarations_without_meaning_are_refused_where_they_are_made(options, said):
    with pytest.raises(TypeError, match=said):
        statistics_field(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"below": "K"}, "is declared with below='K', a size that no field before it has"),
        ({"total": "numsamples"}, "is declared with total='numsamples', which the message does not have"),
    ],
)
def test_names_in_declarations_that_stand_for_nothing(options, said):
    @dataclass(frozen=True, kw_only=True)
    class Own(ClientUpdate):
        numbers: Tensor = statistics_field(**options)

    with pytest.raises(InvalidMessageError, match=rf"Own\.numbers {said}"):
        Own(client=0, round=0, num_samples=3, weights={}, numbers=torch.ones(2)).check_content({}, bool)


def test_an_update_is_read_once(monkeypatch):
    """Every tensor is scanned for NaN and absurd numbers, and none of them twice."""
    seen = []
    original = messages.magnitudes
    monkeypatch.setattr(messages, "magnitudes", lambda all: seen.extend(map(id, all)) or original(all))
    monkeypatch.delattr(messages, "magnitude")
    update = declared()
    Server().check(update)
    assert sorted(seen) == sorted(id(t) for _, _, t in update.tensors())


@pytest.mark.repeated
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_broadcasts_of_every_method_are_as_declared(method):
    """A round checks the first that it sends; here that of another client, after two rounds."""
    federation = run(for_toy(method, epochs=1), 2, limit_val_batches=0)
    server, model = federation.server, federation.clients.models[0]
    broadcast = server.broadcast(1, 2)
    assert any(field.metadata for field in fields(broadcast))
    sizes = dict(server.sizes)  # with those of the method's own
    assert sizes.items() >= {"C": 5, "d": 4, "m": 5}.items()
    broadcast.check_content(server.sizes, lambda condition: bool(getattr(model, condition)))
    assert server.sizes == sizes


@pytest.mark.parametrize("engine", [SequentialEngine(), VectorizedEngine(forward="vmap")], ids=["sequential", "stack"])
def test_the_first_broadcast_of_a_round_is_checked_for_all(engine, monkeypatch):
    checked = []

    def watched(self, *args, check=messages.Message.check_content):
        if isinstance(self, Broadcast):
            checked.append((self.round, self.client))
        return check(self, *args)

    monkeypatch.setattr(messages.Message, "check_content", watched)
    run(FedPAC, 2, engine=engine, cohorts=[[1, 3, 4], [2, 0]])
    assert checked == [(0, 1), (1, 2)]
