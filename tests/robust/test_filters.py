"""Filters: Krum on a line, kinds of content in units of their own, classes that clients share."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pfl_lightning.messages import Broadcast, ClientUpdate, State, statistics_field, weight_field
from pfl_lightning.methods._class_means import ClassMeansUpdate
from pfl_lightning.robust import Krum, MultiKrum
from pfl_lightning.robust.filters import scaled_distances
from pfl_lightning.robust.rules import Entry


def on_a_line(*places):
    sent = Broadcast(client=0, round=0, weights={"encoder.w": torch.zeros(1)})
    weights = [{"encoder.w": torch.tensor([float(place)])} for place in places]
    return [Entry(ClientUpdate(client=k, round=0, num_samples=1, weights=w), sent) for k, w in enumerate(weights)]


def kept(rule, entries, refused=0):
    return [place for place, one in enumerate(rule.judge(entries, refused)) if isinstance(one, ClientUpdate)]


def test_krum_on_a_line():
    # The two closest of 1.1 are 0.1 and 0.2 away, which is the least sum of squares.
    assert kept(Krum(1), on_a_line(0, 1.0, 1.1, 1.3, 9)) == [2]


def test_multi_krum_leaves_out_as_many_as_may_lie():
    entries = on_a_line(0, 1.0, 1.1, 1.3, 9, 1.2, 50)
    assert kept(MultiKrum(2), entries) == [0, 1, 2, 3, 5]
    assert kept(MultiKrum(2, keep=3), entries) == [2, 3, 5]


def test_who_was_found_already_is_not_looked_for_again():
    assert kept(MultiKrum(2), on_a_line(0, 1.0, 1.1, 1.3, 9), refused=1) == [0, 1, 2, 3]
    assert kept(MultiKrum(2), on_a_line(0, 1.0, 1.1, 1.3, 9), refused=2) == [0, 1, 2, 3, 4]
    assert [MultiKrum(2).least(refused) for refused in range(4)] == [7, 5, 1, 1]


def test_a_tolerance_keeps_those_who_are_not_far():
    near = on_a_line(0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    assert len(kept(MultiKrum(2), near)) == 5
    assert len(kept(MultiKrum(2, tolerance=5.0), near)) == 7
    assert kept(MultiKrum(2, tolerance=5.0), on_a_line(0, 0.2, 0.4, 0.6, 0.8, 30, 40)) == [0, 1, 2, 3, 4]


def test_liars_that_send_the_same_are_not_close_to_anyone():
    """Seven of unlike directions are 2 from one another, three that agree 2.23 from them: Krum takes the three."""
    sent = Broadcast(client=0, round=0, weights={"encoder.w": torch.zeros(7)})
    rows = [*torch.eye(7), *torch.full((3, 7), -0.3)]
    updates = [ClientUpdate(client=k, round=0, num_samples=1, weights={"encoder.w": w}) for k, w in enumerate(rows)]
    entries = [Entry(update, sent) for update in updates]
    assert {7, 8, 9} < set(kept(MultiKrum(3), entries))
    assert kept(MultiKrum(3, colluding=True), entries) == [0, 1, 2, 3, 4, 5, 6]


def test_what_is_said_names_the_scores():
    [*_, said] = MultiKrum(1).judge(on_a_line(0, 1.0, 1.1, 1.3, 9), 0)
    assert said.startswith("MultiKrum leaves its update out: its score is ")


@dataclass(frozen=True, kw_only=True)
class _Rich(ClientUpdate):
    control: State = weight_field()
    rows: Tensor = statistics_field(shape="C d", floating=True)
    scalar: Tensor = statistics_field(shape="", floating=True)
    free: Tensor = statistics_field(shape="R d", floating=True)
    counts: Tensor = statistics_field(shape="C", dtype=torch.int64)


def rich(seed=0, count=8):
    generator = torch.Generator().manual_seed(seed)

    def some(*shape, scale=1.0, mean=0.0):
        return mean + scale * torch.randn(shape, generator=generator)

    sent = Broadcast(client=0, round=0, weights={"encoder.w": torch.ones(6), "head.w": torch.ones(2)})
    entries = []
    for client in range(count):
        update = _Rich(
            client=client,
            round=0,
            num_samples=10,
            weights={"encoder.w": some(6, scale=1e3), "head.w": some(2, scale=1e-3)},
            control={"encoder.w": some(6)},
            rows=some(3, 4, mean=5.0),
            scalar=some(scale=1e-4, mean=1.0),
            free=some(2 + client % 3, 4),
            counts=torch.tensor([client, 0, 1]),
        )
        entries.append(Entry(update, sent))
    return entries


FIELDS = {
    "encoder": lambda u: replace(u, weights={**u.weights, "encoder.w": 1e5 * torch.ones(6)}),
    "head": lambda u: replace(u, weights={**u.weights, "head.w": torch.full((2,), 1.5)}),
    "control": lambda u: replace(u, control={"encoder.w": 100 * torch.ones(6)}),
    "a row": lambda u: replace(u, rows=u.rows + torch.tensor([[0.0], [200.0], [0.0]])),
    "scalar": lambda u: replace(u, scalar=torch.tensor(9.0)),
    "rows of no classes": lambda u: replace(u, free=100 * u.free),
}


@pytest.mark.parametrize("name", FIELDS)
def test_no_kind_of_content_drowns_another(name):
    """The encoder's numbers are a million times those of the head."""
    entries = rich()
    entries[3] = entries[3]._replace(update=FIELDS[name](entries[3].update))
    assert 3 not in kept(MultiKrum(1), entries)


def test_a_number_alone_is_compared_with_its_size():
    """Seven that agree to four digits, and one that is a tenth larger: no liar, though a million times as far."""
    entries = rich()
    entries[3] = entries[3]._replace(update=replace(entries[3].update, scalar=torch.tensor(1.1)))
    assert 3 in kept(MultiKrum(1, tolerance=1.6), entries)
    without = [one._replace(update=replace(one.update, scalar=torch.tensor(1.0))) for one in entries]
    torch.testing.assert_close(scaled_distances(entries), scaled_distances(without), rtol=0, atol=0.011)


def test_distances_are_sums_in_units_of_medians():
    entries = on_a_line(0, 1, 3)
    doubled = [
        e._replace(update=replace(e.update, weights={**e.update.weights, "head.w": 7 * e.update.weights["encoder.w"]}))
        for e in entries
    ]
    found = scaled_distances(entries)
    assert found[0, 1].item() == pytest.approx(1 / 4)
    assert found[0, 2].item() == pytest.approx(9 / 4)
    torch.testing.assert_close(scaled_distances(doubled), 2 * found)


def class_means(*held):
    generator = torch.Generator().manual_seed(3)
    sent, entries = Broadcast(client=0, round=0), []
    for client, classes in enumerate(held):
        means = torch.tensor([[10.0 * c, 0.0] for c in classes]) + 0.1 * torch.randn(
            len(classes), 2, generator=generator
        )
        own = torch.tensor(classes)
        entries.append(
            Entry(
                ClassMeansUpdate(
                    client=client, round=0, num_samples=9, classes=own, means=means, counts=torch.ones_like(own)
                ),
                sent,
            )
        )
    return entries


def test_rows_are_compared_by_class():
    """Clients of other classes are not far from one another; who moves the mean of a class is."""
    entries = class_means([0, 1], [1, 2], [0, 3], [0, 1, 2, 3], [4], [1, 3], [0, 2])
    assert float(scaled_distances(entries).max()) < 20
    lie = replace(entries[5].update, means=entries[5].update.means + 3)
    entries[5] = entries[5]._replace(update=lie)
    assert 5 not in kept(MultiKrum(1), entries)


def test_equal_updates_are_as_good_as_one_another():
    assert kept(MultiKrum(1, tolerance=1.0), on_a_line(1, 1, 1, 1, 1)) == [0, 1, 2, 3, 4]
