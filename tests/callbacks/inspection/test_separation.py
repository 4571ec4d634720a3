"""DualFed's measures, read back from the event files and computed again from the clients' models."""

from functools import partial

import pytest
import torch
from _helpers.events import assert_drawn, board, charts, events, picture, rounds, scalars
from _helpers.toy import CLIENTS, Toy, for_toy, run, tiny_encoder, wide_encoder

from pfl_lightning.callbacks import RepresentationMeasures
from pfl_lightning.functional import class_separation, linear_cka
from pfl_lightning.methods import DualFed, FedPer, LocalOnly


def play(tmp_path, method, number=3, **options):
    callback = RepresentationMeasures(2, samples=1000)
    federation = run(method, number, callbacks=[callback], logger=board(tmp_path), **options)
    return events(tmp_path), federation


def pre_and_post(federation, client, inputs):
    model = federation.client_model(client).eval()
    with torch.no_grad():
        features = model.encoder(inputs)
        return {"pre_projection": features, "post_projection": model.projector(features)}


def test_dualfeds_measures(tmp_path):
    data = Toy()
    found, federation = play(tmp_path, for_toy(DualFed, epochs=1), data=data)
    own = [data.tensors(client, "test") for client in range(CLIENTS)]
    everything = torch.cat([inputs for inputs, _ in own])
    for name in ("pre_projection", "post_projection"):
        values = []
        for client, (inputs, labels) in enumerate(own):
            values.append(class_separation(pre_and_post(federation, client, inputs)[name], labels))
        with_value = [value for value in values if value == value]
        assert scalars(found, f"separation/{name}")[2] == pytest.approx(sum(with_value) / len(with_value), abs=1e-5)
        shown = [pre_and_post(federation, client, everything)[name] for client in range(CLIENTS)]
        pairs = [linear_cka(shown[i], shown[j]) for i in range(CLIENTS) for j in range(i)]
        assert scalars(found, f"cka/{name}")[2] == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
        assert rounds(found, f"cka_matrix/{name}") == [0, 1, 2]
        assert_drawn(picture(found, f"cka_matrix/{name}", 2))
    assert scalars(found, "cka/pre_projection")[2] == pytest.approx(1)  # one encoder for all
    assert scalars(found, "cka/post_projection")[2] < 0.999  # projectors of their own
    assert charts(found)["representations", "linear CKA, mean over pairs of clients"] == ["cka/.*"]


def test_encoders_of_different_widths(tmp_path):
    found, _ = play(tmp_path, partial(LocalOnly, epochs=1), 1, encoder=[tiny_encoder, wide_encoder])
    assert 0 < scalars(found, "cka/features")[0] < 0.999


def test_one_client_has_no_pairs(tmp_path):
    callback = RepresentationMeasures(1, clients=1)
    run(partial(FedPer, epochs=1), 1, callbacks=[callback], logger=board(tmp_path))
    found = events(tmp_path)
    assert "cka/features" not in found.Tags()["scalars"]
    assert "separation/features" in found.Tags()["scalars"]


def test_without_samples_it_says_so(tmp_path):
    callback = RepresentationMeasures(1, part="validation")
    options = {"data": Toy(validation=0), "logger": board(tmp_path)}
    with pytest.warns(UserWarning, match="RepresentationMeasures shows nothing: no client has samples in its valid"):
        run(partial(FedPer, epochs=1), callbacks=[callback], **options)
    assert not events(tmp_path).Tags()["images"]
