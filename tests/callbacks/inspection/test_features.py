"""Features in the plane and in the Embedding Projector, read back from the files."""

from functools import partial

import numpy as np
import pytest
import torch
from _helpers.events import assert_drawn, board, events, picture, rounds
from _helpers.toy import CLIENTS, Toy, for_toy, linear_encoder, run, tiny_encoder, wide_encoder
from google.protobuf import text_format
from lightning.pytorch.loggers import CSVLogger
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

from pfl_lightning.callbacks import FeatureEmbedding
from pfl_lightning.callbacks.inspection.features import Points, draw_points, tsne
from pfl_lightning.callbacks.inspection.figures import render
from pfl_lightning.methods import DualFed, FedPer, LocalOnly

QUICK = partial(FedPer, epochs=1)


def config(folder):
    entries = text_format.Parse((folder / "projector_config.pbtxt").read_text(), ProjectorConfig()).embeddings
    assert len({entry.tensor_name for entry in entries}) == len(entries)
    return {entry.tensor_name: entry for entry in entries}


def table(path):
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_pictures_of_both_representations_of_dualfed(tmp_path):
    run(for_toy(DualFed, epochs=1), 2, callbacks=[FeatureEmbedding(10)], logger=board(tmp_path))
    found = events(tmp_path)
    assert sorted(found.Tags()["images"]) == ["features/post_projection", "features/pre_projection"]
    for tag in found.Tags()["images"]:
        assert rounds(found, tag) == [0, 1]
        assert_drawn(picture(found, tag, 1))


def test_the_projector_has_the_features_of_each_round_with_class_client_and_encoder(tmp_path):
    data, encoders = Toy(), [tiny_encoder, linear_encoder]
    method = partial(LocalOnly, epochs=1)
    federation = run(method, 2, callbacks=[FeatureEmbedding(1)], logger=board(tmp_path), data=data, encoder=encoders)
    folder = tmp_path / "version_0"
    first, entry = config(folder).values()
    assert (first.tensor_name, entry.tensor_name) == ("features:00000", "features:00001")
    rows = table(folder / entry.metadata_path)
    assert rows[0] == ["class", "client", "encoder"]
    expected, metadata = [], []
    for client in range(CLIENTS):
        inputs, labels = data.tensors(client, "test")
        with torch.no_grad():
            expected.append(federation.client_model(client).eval().encoder(inputs))
        label = ("tiny_encoder", "linear_encoder")[client % 2]
        metadata += [["abcde"[c], str(client), label] for c in labels.tolist()]
    assert rows[1:] == metadata
    got = np.loadtxt(folder / entry.tensor_path, delimiter="\t")
    np.testing.assert_allclose(got, torch.cat(expected).numpy(), rtol=1e-4, atol=1e-6)


def test_features_of_different_widths_have_separate_figures(tmp_path):
    method, encoders = partial(LocalOnly, epochs=1), [tiny_encoder, wide_encoder]
    run(method, 1, callbacks=[FeatureEmbedding(1)], logger=board(tmp_path), encoder=encoders)
    assert sorted(events(tmp_path).Tags()["images"]) == ["features/features_4", "features/features_7"]
    folder = tmp_path / "version_0"
    shapes = {name: np.loadtxt(folder / entry.tensor_path).shape for name, entry in config(folder).items()}
    assert shapes == {"features_4:00000": (24, 4), "features_7:00000": (16, 7)}


def test_a_resumed_run_goes_on(tmp_path):
    options = {"logger": board(tmp_path), "enable_checkpointing": True}
    federation = run(QUICK, 1, callbacks=[FeatureEmbedding(1)], **options)
    path = federation.trainer.checkpoint_callback.best_model_path
    run(QUICK, 2, callbacks=[FeatureEmbedding(1)], **options | {"logger": board(tmp_path)}, ckpt_path=path)
    assert rounds(events(tmp_path), "features/features") == [0, 1]
    assert list(config(tmp_path / "version_0")) == ["features:00001"]
    assert (tmp_path / "version_0" / "00000").is_dir()


def test_without_tensorboard_there_is_no_projector(tmp_path, caplog):
    logger = CSVLogger(tmp_path, name="", version="")
    with caplog.at_level("INFO"):
        run(QUICK, 2, callbacks=[FeatureEmbedding(1)], logger=logger)
    files = sorted(path.name for path in (tmp_path / "inspection").rglob("*.*"))
    assert files == ["features-round-0001.png", "features-round-0002.png"]
    assert caplog.text.count("the Embedding Projector is skipped") == 1


def test_too_few_samples_are_named():
    with pytest.warns(UserWarning, match="no figure of features: 3 samples, a t-SNE needs at least 4"):
        run(QUICK, callbacks=[FeatureEmbedding(1, clients=3, samples=1)])


# ---------------------------------------------------------------------- the plane


@pytest.mark.parametrize("width", [2, 80])
def test_neighbors_stay_neighbors(width):
    torch.manual_seed(0)
    cluster = torch.arange(60) % 3
    points = 20 * torch.randn(3, width)[cluster] + torch.randn(60, width)
    plane = tsne(points, seed=7)
    assert plane.shape == (60, 2)
    distances = np.linalg.norm(plane[:, None] - plane[None], axis=2) + 1e9 * np.eye(60)
    assert (cluster.numpy()[distances.argmin(axis=1)] == cluster.numpy()).all()
    assert (tsne(points, seed=7) == plane).all()


@pytest.mark.parametrize("points", [torch.ones(6, 3), torch.randn(4, 5), torch.randn(9, 1)])
def test_odd_points_have_a_place(points):
    assert np.isfinite(tsne(points, seed=0)).all()


def test_points_are_coloured_by_class_and_by_client():
    labels, clients = np.array([0, 1, 1, 3]), np.array([7, 7, 9, 9])
    plane = np.arange(8.0).reshape(4, 2)
    figure = draw_points(Points("x", torch.zeros(4, 2), labels, clients), plane, "abcd", "title")
    for axes, values, names in zip(figure.axes, (labels, clients), (["a", "b", "d"], ["7", "9"]), strict=True):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == names
        seen = {}
        for dots in axes.collections:
            for place in dots.get_offsets():
                seen[tuple(place)] = tuple(dots.get_facecolor()[0])
        color_of = [seen[tuple(row)] for row in plane]
        for i in range(4):
            for j in range(4):
                assert (color_of[i] == color_of[j]) == (values[i] == values[j])


def test_names_of_classes_are_no_formulas_and_none_is_left_out():
    names = ["$_to_$", "_silence_", "$10 to $50"]
    points = Points("features", torch.randn(6, 2), np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 1, 0, 1]))
    figure = draw_points(points, np.random.default_rng(0).normal(size=(6, 2)), names, "x")
    render(figure)
    shown = [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()]
    assert shown == names
    assert not any(text.get_parse_math() for text in figure.axes[0].get_legend().get_texts() if "$" in text.get_text())
