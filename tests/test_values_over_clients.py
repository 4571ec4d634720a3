"""Logged values over clients: reductions, and clients for which a value is undefined."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfl_lightning.metrics import over_clients
from pfl_lightning.notices import forget_shown

VALUES = st.floats(-1e3, 1e3) | st.just(math.nan)
REFERENCES = {"sum": np.nansum, "min": np.nanmin, "max": np.nanmax}


@given(st.lists(st.tuples(VALUES, st.integers(1, 100)), min_size=1, max_size=6))
def test_undefined_values_are_left_out_of_every_reduction(pairs):
    forget_shown()
    values, weights = ({i: float(pair[k]) for i, pair in enumerate(pairs)} for k in (0, 1))
    array, known = np.array([*values.values()]), [not math.isnan(value) for value in values.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {how: over_clients("v", values, weights, how) for how in ("mean", *REFERENCES)}
    for how, one in found.items():
        if not any(known):
            assert math.isnan(one["v"])
            assert one.keys() == {"v"}
            continue
        mean = np.average(array[known], weights=np.array([*weights.values()])[known])
        assert one["v"] == pytest.approx(mean if how == "mean" else REFERENCES[how](array))
        assert one.get("v/clients", len(pairs)) == sum(known)
        assert ("v/clients" in one) == (not all(known))


def test_each_client_is_named_once():
    forget_shown()

    def said(*undefined):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            over_clients(
                "auc",
                {client: math.nan if client in undefined else 0.5 for client in range(4)},
                dict.fromkeys(range(4), 1),
            )
        return [str(warning.message) for warning in caught]

    assert [text.partition(": ")[0] for text in said(1, 3)] == ["auc is undefined (NaN) for clients 1, 3"]
    assert not said(3)
    assert [text.partition(": ")[0] for text in said(0, 1)] == ["auc is undefined (NaN) for client 0"]
    assert "for all clients" in said(0, 1, 2, 3)[0]
    assert not said(0, 1, 2, 3)
