"""Pictures of every kind of pixels, and files that no decoder should be given."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from pfl_lightning.datamodules.datasets.images import decode_image, to_bytes

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


def write_png(path, samples, color_type):
    """A PNG file of 16 bits, which Pillow writes in gray alone."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], 16, color_type, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def shows_the_ramp(path):
    pixels = decode_image(str(path), None)
    return pixels.shape == (3, 16, 16) and all((channel == RAMP).all() for channel in pixels)


@pytest.mark.parametrize("lower", [0, 128, 255])
def test_16_bits_keep_the_upper_eight(tmp_path, lower):
    sixteen = RAMP.astype(np.uint16) * 256 + lower
    opaque = np.full_like(sixteen, 65535)
    for kind, channels in ((0, [sixteen]), (2, [sixteen] * 3), (4, [sixteen, opaque]), (6, [sixteen] * 3 + [opaque])):
        write_png(tmp_path / f"{kind}.png", np.stack(channels, axis=-1), kind)
        assert shows_the_ramp(tmp_path / f"{kind}.png")
    Image.fromarray(sixteen).save(tmp_path / "gray.tiff")
    assert shows_the_ramp(tmp_path / "gray.tiff")
    (tmp_path / "gray.pgm").write_bytes(b"P5\n16 16\n65535\n" + sixteen.astype(">u2").tobytes())
    assert shows_the_ramp(tmp_path / "gray.pgm")


def test_gray_is_read_as_pillow_converts(tmp_path):
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    alpha = rng.integers(0, 256, (5, 7, 1), dtype=np.uint8)
    for name, pixels in (("rgb.png", colors), ("rgba.png", np.concatenate([colors, alpha], axis=-1))):
        Image.fromarray(pixels).save(tmp_path / name)
        gray = decode_image(str(tmp_path / name), None, 1)
        assert gray.shape == (1, 5, 7)
        assert np.abs(gray[0] - colors @ (0.299, 0.587, 0.114)).max() < 1  # rounded
    for name in ("l.png", "la.png"):
        Image.fromarray(colors[..., 0]).convert(name[:-4].upper()).save(tmp_path / name)
        assert np.array_equal(decode_image(str(tmp_path / name), None, 1)[0], colors[..., 0])
        assert np.array_equal(decode_image(str(tmp_path / name), None)[2], colors[..., 0])
    write_png(tmp_path / "sixteen.png", RAMP.astype(np.uint16)[..., None] * 256 + 9, 0)
    assert np.array_equal(decode_image(str(tmp_path / "sixteen.png"), None, 1)[0], RAMP)
    assert decode_image(str(tmp_path / "rgb.png"), 4, 1).shape == (1, 4, 4)


def test_palettes_give_their_colors(tmp_path):
    colors = np.random.default_rng(0).integers(0, 256, (256, 3), dtype=np.uint8)
    picture = Image.fromarray(RAMP)
    picture.putpalette(colors.tobytes())
    assert picture.mode == "P"
    for name, options in (("a.png", {}), ("b.gif", {}), ("c.png", {"transparency": 3}), ("d.tiff", {})):
        picture.save(tmp_path / name, **options)
        assert np.array_equal(decode_image(str(tmp_path / name), None), colors[RAMP].transpose(2, 0, 1))
    assert np.array_equal(np.asarray(to_bytes(picture)), colors[RAMP])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_every_kind_becomes_bytes(mode):
    found = to_bytes(Image.fromarray(RAMP).convert("RGB").convert("L" if mode == "PA" else mode).convert(mode))
    assert np.asarray(found).dtype == np.uint8
    assert found.mode in ("L", "LA", "RGB", "RGBA")


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_unknown_range_are_refused(tmp_path, dtype):
    path = tmp_path / "depth.tiff"
    Image.fromarray(RAMP.astype(dtype)).save(path)
    with pytest.raises(
        ValueError,
        match=r"cannot read the image .*depth\.tiff: ValueError: its pixels are floats or 32-bit numbers.*to 8 or 16",
    ):
        decode_image(str(path), None)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bombs_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    Image.new("L", (300, 10)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    monkeypatch.setattr(Image.Image, "convert", lambda *args: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"cannot read the image .*bomb\.png: .*(pixels|bomb).*replace or remove"):
        decode_image(str(path), 32)


def whole_file(ending):
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, {"jpg": "JPEG", "tif": "TIFF"}.get(ending, ending))
    return file.getvalue()


@pytest.mark.filterwarnings("ignore")  # Pillow's own about metadata
@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "bmp", "webp", "tif", "ppm"])
def test_damaged_files_give_one_kind_of_error(tmp_path, ending):
    """Whatever a decoder makes of damaged bytes: pixels, or an error that names the file."""
    content, path = whole_file(ending), tmp_path / f"x.{ending}"
    rng = np.random.default_rng(1)
    damaged = [b"", content[:7], b"\0" * len(content), os.urandom(300)]
    damaged += [content[: rng.integers(len(content))] for _ in range(20)]
    for _ in range(60):
        flipped = bytearray(content)
        for place in rng.integers(0, min(len(content), 200), 3):
            flipped[place] ^= 1 << rng.integers(8)
        damaged.append(bytes(flipped))
    refused = 0
    for case in damaged:
        path.write_bytes(case)
        try:
            assert decode_image(str(path), 8).shape == (3, 8, 8)
        except ValueError as error:
            assert f"cannot read the image {path}: " in str(error)  # noqa: PT017
            refused += 1
    assert refused >= 4
