"""The importers' pixels: every kind of picture as 8 bits of grey or colour, of one size."""

import io
import os
import struct
import zlib

import click
import numpy as np
import pytest
from PIL import Image, ImageCms

from cli.values import Size
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.evaluate.sources import open_source
from numdiff.extras.importers.importing import import_dataset
from numdiff.extras.importers.pictures import decoded
from numdiff.training.sample_files import read_mask, read_picture
from tests.extras.importers.sources import (
    ADOBE,
    SRGB,
    colours,
    contents,
    fill,
    icc,
    png,
    png_of_chunks,
    saved,
    tiff,
)


def imported(tmp_path, out, data, **options):
    """The one image of a folder that holds one file of these bytes."""
    import_dataset(fill(tmp_path / "one", {"a.png": data}), out, force=True, **options)
    return contents(out)[0][0]


def test_16_bit_pixels(tmp_path, out):
    values = np.array([[0, 128, 257, 65535], [32768, 65278, 300, 1]] * 2, np.uint16)
    expected = np.rint(values / 257).astype(np.uint8)
    assert np.array_equal(imported(tmp_path, out, values)[..., 0], expected)
    tiff = saved(Image.fromarray(values), "TIFF")
    assert np.array_equal(imported(tmp_path, out, tiff)[..., 0], expected)
    rgb = np.stack([values] * 3, -1)
    assert np.array_equal(imported(tmp_path, out, rgb), np.stack([expected] * 3, -1))


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_16_bit_colour_is_rounded(tmp_path, out, rng, channels):
    """Pillow truncates it. What is transparent is so to the last bit."""
    square = rng.integers(0, 65536, (5, 5, channels), np.uint16)
    square[0, :3, 0] = 127, 128, 129
    if channels != 3:
        square[..., -1] = 65535  # opaque
    shown = np.rint(square / 257).astype(np.uint8)[..., : channels - (channels != 3)]
    assert np.array_equal(imported(tmp_path, out, png(square)), shown)
    if channels == 2:
        return
    for order in "<>":
        for compressed in (False, True):
            found = imported(
                tmp_path, out, tiff(square, order, compressed, 2 if channels == 4 else None)
            )
            assert np.array_equal(found, shown), (order, compressed)


def test_16_bit_colour_that_is_transparent(tmp_path, out):
    """The transparent colour of a PNG is compared in 16 bits: its neighbour of the same 8 bits is
    opaque."""
    row = struct.pack(">6H", 514, 771, 1028, 515, 771, 1028)
    data = png_of_chunks(
        (b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)),
        (b"tRNS", struct.pack(">HHH", 514, 771, 1028)),
        (b"IDAT", zlib.compress((b"\0" + row) * 2)),
    )
    assert imported(tmp_path, out, data).tolist() == [[[255, 255, 255], [2, 3, 4]]] * 2
    alpha = np.zeros((2, 2, 4), np.uint16)
    alpha[..., 0], alpha[..., 3] = 65535, 32896
    assert imported(tmp_path, out, png(alpha), background="black")[0, 0].tolist() == [128, 0, 0]


# Large JPEGs --------------------------------------------------------------------------------------


def smooth(width, height):
    """A picture whose colours are linear in x and in y, and so show where it was cut."""
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    return np.stack([255 * x / width, 255 * y / height, 255 * (x + y) / (width + height)], -1)


# width, height, size of the result
SIZES = [(600, 377, 32), (401, 223, 48), (279, 500, 16), (425, 213, 13)]


@pytest.mark.parametrize(
    "width, height, size, fit, orientation",
    [
        *((*SIZES[i % 4], "crop", i) for i in range(1, 9)),
        *((*SIZES[i], "crop", 6) for i in (0, 1, 3)),
        *((*SIZES[i], fit, 6 - 3 * (i == 2)) for i in range(4) for fit in ("stretch", "pad")),
    ],
)
def test_a_reduced_jpeg_is_cut_where_the_whole_one_is(
    tmp_path, out, width, height, size, fit, orientation
):
    """Decoded at 1/2 to 1/8, also where that gives no whole number of pixels, and whichever side is
    up."""
    pixels = np.rint(smooth(width, height)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg = saved(Image.fromarray(pixels), "JPEG", quality=100, subsampling=0, exif=exif)
    with decoded(len(jpeg), lambda: jpeg, size) as image:
        assert max(image.size) <= 300
    found = imported(tmp_path, out, jpeg, size=size, fit=fit, background="black").astype(float)
    whole = imported(
        tmp_path,
        out,
        saved(Image.fromarray(pixels), "PNG", exif=exif),
        size=size,
        fit=fit,
        background="black",
    )
    off = (found - whole).mean((0, 1)) / (255 / size)  # in pixels of the result, about
    assert np.abs(off[:2]).max() < 0.05 and np.abs(found - whole)[1:-1, 1:-1].max() <= 2


@pytest.mark.parametrize("size, scale", [(64, 4), (128, 2), (32, 8)])
def test_a_reduced_jpeg_is_near_the_whole_one(tmp_path, out, rng, size, scale):
    """On noise with the spectrum of photos, 1/f: 48 dB here, up to 57 in larger pictures."""
    frequencies = np.hypot(np.fft.fftfreq(523)[:, None], np.fft.fftfreq(700)[None])
    frequencies[0, 0] = 1
    noise = np.fft.ifft2(np.fft.fft2(rng.standard_normal((523, 700))) / frequencies).real
    noise = (255 * (noise - noise.min()) / np.ptp(noise)).astype(np.uint8)
    jpeg = saved(Image.fromarray(noise), "JPEG", quality=92)
    with decoded(len(jpeg), lambda: jpeg, size) as image:
        assert image.width == -(-700 // scale)
    found = imported(tmp_path, out, jpeg, size=size).astype(float)
    whole = imported(tmp_path, out, saved(Image.open(io.BytesIO(jpeg)), "PNG"), size=size)
    assert 10 * np.log10(255**2 / ((found - whole) ** 2).mean()) > 46


def test_only_the_crop_is_seen(tmp_path, out):
    """The picture has another colour outside the middle square, which reaches half a reduced pixel
    inwards at most."""
    image = np.zeros((512, 1030, 3), np.uint8)
    image[:, 259:771] = 200
    whole = imported(tmp_path, out, image, size=32)
    assert (whole == 200).all()
    jpeg = imported(
        tmp_path, out, saved(Image.fromarray(image), "JPEG", quality=100, subsampling=0), size=32
    )
    assert np.abs(jpeg[:, 2:-2].astype(int) - 200).max() <= 2 and jpeg.min() > 150


# Colour profiles ----------------------------------------------------------------------------------


def in_srgb(pixels, matrix, gamma=2.2):
    """float64 in 0 … 255: the same colours in sRGB, by the formulas of IEC 61966-2-1."""
    linear = np.clip((pixels / 255.0) ** gamma @ (np.linalg.inv(SRGB) @ matrix).T, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def notes_of(tmp_path, out, data, **options):
    return import_dataset(fill(tmp_path / "one", {"a.png": data}), out, force=True, **options).notes


@pytest.mark.parametrize(
    "form, options",
    [
        ("PNG", {}),
        ("TIFF", {}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"quality": 100, "subsampling": 0}),
    ],
)
def test_colour_profiles(tmp_path, out, rng, form, options):
    pixels = np.repeat(np.repeat(rng.integers(0, 256, (2, 2, 3), np.uint8), 8, 0), 8, 1)
    data = saved(Image.fromarray(pixels), form, icc_profile=icc(ADOBE), **options)
    found, expected = imported(tmp_path, out, data).astype(float), in_srgb(pixels, ADOBE)
    assert np.abs(found - expected).max() < (6 if form == "JPEG" else 1.5)
    assert notes_of(tmp_path, out, data) == [
        "1 image was converted to sRGB from the colour profile in the file (a.png)."
    ]
    path = tmp_path / "one" / "a.png"
    assert np.allclose((read_picture(path, (16, 16, 3)) + 1) * 127.5, found, atol=1e-3)
    assert np.array_equal(next(iter(open_source(tmp_path / "one").batches(1)))[0], found)
    plain = saved(Image.fromarray(pixels), form, **options)
    for profile in (None, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()):
        same = saved(Image.fromarray(pixels), form, icc_profile=profile, **options)
        assert np.array_equal(imported(tmp_path, out, same), imported(tmp_path, out, plain))
        assert notes_of(tmp_path, out, same) == []


def test_profiles_of_other_pixels(tmp_path, out, rng):
    """Transparent, grey, of a palette, of 16 bits, on its side."""
    pixels = np.repeat(np.repeat(rng.integers(0, 256, (2, 2, 4), np.uint8), 8, 0), 8, 1)
    pixels[..., 3] = [[255] * 8 + [0] * 8] * 16
    found = imported(
        tmp_path,
        out,
        saved(Image.fromarray(pixels), "PNG", icc_profile=icc(ADOBE)),
        background="red",
    )
    assert np.abs(found[:, :8] - in_srgb(pixels[..., :3], ADOBE)[:, :8]).max() < 1.5
    assert (found[:, 8:] == [255, 0, 0]).all()
    grey = np.tile(np.arange(0, 256, 16, dtype=np.uint8), (16, 1))
    expected = in_srgb(np.stack([grey] * 3, -1), SRGB, 1.0)[..., :1]
    for profile in (icc(gamma=1.0, space=b"GRAY"), icc(SRGB, gamma=1.0)):
        found = imported(tmp_path, out, saved(Image.fromarray(grey), "PNG", icc_profile=profile))
        assert found.shape == (16, 16, 1) and np.abs(found - expected).max() < 1.5
        deep = saved(Image.fromarray(grey.astype(np.uint16) * 257), "PNG", icc_profile=profile)
        assert np.abs(imported(tmp_path, out, deep) - expected).max() < 1.5
    palette = Image.fromarray(pixels[..., :3]).quantize(4)
    found = imported(tmp_path, out, saved(palette, "PNG", icc_profile=icc(ADOBE)))
    assert np.abs(found - in_srgb(np.asarray(palette.convert("RGB")), ADOBE)).max() < 1.5
    chunk = b"a\0\0" + zlib.compress(icc(ADOBE))
    deep = png(pixels[..., :3].astype(np.uint16) * 257)
    found = imported(tmp_path, out, deep[:33] + png_of_chunks((b"iCCP", chunk))[8:-12] + deep[33:])
    assert np.abs(found - in_srgb(pixels[..., :3], ADOBE)).max() < 1.5
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = saved(Image.fromarray(pixels[..., :3]), "PNG", icc_profile=icc(ADOBE), exif=exif)
    assert (
        np.abs(
            imported(tmp_path, out, turned) - np.rot90(in_srgb(pixels[..., :3], ADOBE), -1)
        ).max()
        < 1.5
    )


def test_a_profile_of_inks(tmp_path, out):
    """CMYK by its profile, here L* = 100 (1 - c)(1 - m)(1 - y)(1 - k); without one by Pillow's
    formula."""
    inks = np.zeros((8, 8, 4), np.uint8)
    inks[4:, :, 3], inks[:, 4:, 0] = 128, 255
    image = Image.fromarray(inks, "CMYK")
    found = imported(
        tmp_path, out, saved(image, "TIFF", icc_profile=icc(space=b"CMYK", kind=b"prtr"))
    )
    lightness = 100 * (1 - 128 / 255)
    luminance = ((lightness + 16) / 116) ** 3
    grey = 255 * (1.055 * luminance ** (1 / 2.4) - 0.055)
    assert (
        (found[0, 0] >= 254).all()
        and found[0, 7].max() <= 1
        and np.abs(found[7, 0] - grey).max() < 2
    )
    assert imported(tmp_path, out, saved(image, "TIFF"))[0, 7].tolist() == [0, 255, 255]


def test_profiles_in_threads(tmp_path, out, rng):
    """One transform serves all threads, and each picture is converted by its own."""
    pixels = rng.integers(0, 256, (60, 4, 4, 3), np.uint8)
    profiles = [icc(ADOBE), icc(SRGB, gamma=1.0), None]
    source = fill(
        tmp_path / "s",
        {
            f"{i:02d}.png": saved(Image.fromarray(image), "PNG", icc_profile=profiles[i % 3])
            for i, image in enumerate(pixels)
        },
    )
    report = import_dataset(source, out)
    for i, image in enumerate(contents(out)[0]):
        expected = (in_srgb(pixels[i], ADOBE), in_srgb(pixels[i], SRGB, 1.0), pixels[i])[i % 3]
        assert np.abs(image - expected).max() < 1.5
    assert report.notes == [
        "40 images were converted to sRGB from the colour profile in the file (00.png, 01.png, "
        "03.png, …)."
    ]


@pytest.mark.parametrize(
    "profile",
    [
        b"?",
        bytes(200),
        icc(ADOBE)[:200],
        icc(ADOBE, space=b"CMYK"),
        icc(gamma=2.2, space=b"GRAY"),
        icc(ADOBE, space=b"Lab "),
        icc(ADOBE, kind=b"link"),
        icc(ADOBE) + bytes(5 << 20),
        icc(ADOBE)
        .replace(b"desc", b"D2B0", 1)
        .replace(struct.pack(">I", 92), struct.pack(">I", 1 << 20), 1),
    ],
    ids=["short", "zeros", "cut off", "of CMYK", "of grey", "of Lab", "link", "large", "elements"],
)
def test_profiles_that_cannot_be_used(tmp_path, out, profile):
    """The picture is as without it, and the report says so."""
    pixels = colours(1, 16)[0]
    data = saved(Image.fromarray(pixels), "TIFF", icc_profile=profile)
    assert np.array_equal(imported(tmp_path, out, data), pixels)
    assert notes_of(tmp_path, out, data) == [
        "1 image was taken for sRGB, as the colour profile cannot be used (a.png)."
    ]


def test_palette_with_transparency(tmp_path, out):
    palette = bytes([255, 0, 0, 0, 255, 0, 0, 0, 255])
    rows = b"".join(b"\0" + bytes(row) for row in ([0, 1], [2, 0]))
    header = struct.pack(">IIBBBBB", 2, 2, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows))]
    expected = [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 0, 0]]]
    assert imported(tmp_path, out, png_of_chunks(*chunks)).tolist() == expected
    chunks.insert(2, (b"tRNS", bytes([255, 0, 255])))  # the second colour is transparent
    expected[0][1] = [255, 255, 255]
    assert imported(tmp_path, out, png_of_chunks(*chunks)).tolist() == expected
    expected[0][1] = [0, 0, 128]
    assert imported(tmp_path, out, png_of_chunks(*chunks), background="navy").tolist() == expected


def test_alpha_over_a_colour(tmp_path, out):
    image = np.zeros((2, 2, 4), np.uint8)
    image[..., 0], image[..., 3] = 200, [[255, 128], [0, 0]]
    over_white = imported(tmp_path, out, image)
    assert over_white[0, 0].tolist() == [200, 0, 0] and over_white[1, 1].tolist() == [255, 255, 255]
    assert np.abs(over_white[0, 1].astype(int) - [228, 127, 127]).max() <= 1
    assert imported(tmp_path, out, image, background="#102030")[1, 0].tolist() == [16, 32, 48]
    grey = image[..., [0, 3]]
    assert imported(tmp_path, out, grey)[..., 0].tolist()[1] == [255, 255]
    assert imported(tmp_path, out, grey, background="red")[1, 0].tolist() == [255, 0, 0]
    with pytest.raises(UsageError, match="--background 'whitish' is not a colour"):
        imported(tmp_path, out, image, background="whitish")


def test_transparent_grey(tmp_path, out):
    """Of 16 bits, and of fewer than 8: one channel over grey, three over a colour; opaque pixels as
    without alpha."""
    values = np.array([[0, 514], [32896, 65535]], np.uint16)

    def chunks(depth, rows, transparent):
        header = (b"IHDR", struct.pack(">IIBBBBB", 2, 2, depth, 0, 0, 0, 0))
        return png_of_chunks(
            header, (b"tRNS", struct.pack(">H", transparent)), (b"IDAT", zlib.compress(rows))
        )

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    assert imported(tmp_path, out, chunks(16, rows, 514))[..., 0].tolist() == [[0, 255], [128, 255]]
    assert imported(tmp_path, out, chunks(16, rows, 514), background="black").tolist() == [
        [[0], [0]],
        [[128], [255]],
    ]
    assert imported(tmp_path, out, chunks(16, rows, 515))[..., 0].tolist() == [[0, 2], [128, 255]]
    assert imported(tmp_path, out, chunks(16, rows, 514), background="red").tolist() == [
        [[0, 0, 0], [255, 0, 0]],
        [[128, 128, 128], [255, 255, 255]],
    ]
    for depth, rows, expected in (
        (2, b"\0\x10\0\xb0", [[0, 255], [170, 255]]),
        (4, b"\0\x0a\0\x0f", [[0, 255], [0, 255]]),
        (1, b"\0\x40\0\x80", [[0, 255], [255, 0]]),
    ):
        transparent = {1: 1, 2: 1, 4: 10}[depth]  # the upper right pixel
        assert (
            imported(tmp_path, out, chunks(depth, rows, transparent))[..., 0].tolist() == expected
        )
    alpha = np.stack([values, [[65535, 65535], [65535, 0]]], -1).astype(np.uint16)
    assert imported(tmp_path, out, png(alpha))[..., 0].tolist() == [[0, 2], [128, 255]]
    assert imported(tmp_path, out, png(alpha), background="black").shape == (2, 2, 1)
    assert imported(tmp_path, out, png(alpha), background="red")[1, 1].tolist() == [255, 0, 0]
    rgb = png_of_chunks(
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        (b"tRNS", struct.pack(">HHH", 514, 771, 1028)),
        (b"IDAT", zlib.compress(b"\0" + struct.pack(">HHH", 514, 771, 1028))),
    )
    assert imported(tmp_path, out, rgb).tolist() == [[[255, 255, 255]]]


def test_postscript_under_another_name(tmp_path, out, monkeypatch):
    """No reader of the picture starts Ghostscript."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    path = fill(tmp_path / "s", {"a.png": eps}) / "a.png"
    for read in (
        lambda: import_dataset(tmp_path / "s", out),
        lambda: read_picture(path, (8, 8, 3)),
        lambda: read_mask(str(path), 8),
        lambda: open_source(tmp_path / "s"),
    ):
        with pytest.raises(NumdiffError, match="not an image that Pillow can read"):
            read()
    assert not (tmp_path / "started").exists()


def test_picture_is_read_alike_everywhere(tmp_path, out):
    values = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))
    path = fill(tmp_path / "s", {"a.png": values}) / "a.png"
    import_dataset(tmp_path / "s", out)
    expected = contents(out)[0][0]
    assert len(np.unique(expected)) == 16
    assert np.allclose((read_picture(path, (16, 16, 1)) + 1) * 127.5, expected, atol=1e-3)
    assert np.array_equal(
        next(iter(open_source(tmp_path / "s").batches(1)))[0], np.repeat(expected, 3, -1)
    )


def test_cmyk_one_bit_and_gif(tmp_path, out):
    cmyk = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    assert np.abs(imported(tmp_path, out, cmyk).astype(int) - [255, 0, 0]).max() <= 6
    bits = saved(Image.fromarray(np.eye(8, dtype=bool)), "PNG")
    assert np.array_equal(imported(tmp_path, out, bits)[..., 0], 255 * np.eye(8, dtype=np.uint8))
    gif = saved(
        Image.new("RGB", (8, 8), (0, 0, 255)),
        "GIF",
        save_all=True,
        append_images=[Image.new("RGB", (8, 8), (255, 0, 0))],
    )
    assert imported(tmp_path, out, gif)[0, 0].tolist() == [0, 0, 255]


def test_float_pixels_are_refused_by_name(tmp_path, out):
    with pytest.raises(NumdiffError, match="a.png: floating-point pixels"):
        imported(tmp_path, out, saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


@pytest.mark.parametrize(
    "orientation, turned",
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),
        (8, lambda a: np.rot90(a)),
    ],
)
def test_exif_orientation(tmp_path, out, orientation, turned):
    image = np.zeros((16, 16, 3), np.uint8)
    image[:8, :8], image[:8, 8:] = 255, (255, 0, 0)
    exif = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    data = saved(
        Image.fromarray(image), "JPEG", quality=100, subsampling=0, exif=b"Exif\0\0" + exif
    )
    assert np.abs(imported(tmp_path, out, data).astype(int) - turned(image)).max() < 8


def test_crop_pad_and_stretch(tmp_path, out):
    image = np.zeros((16, 48, 3), np.uint8)
    image[:, :16], image[:, 16:32], image[:, 32:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert np.array_equal(imported(tmp_path, out, image, size=16), image[:, 16:32])
    assert np.array_equal(imported(tmp_path, out, image, size=8), image[:8, 16:24])
    padded = imported(tmp_path, out, image, size=48, fit="pad", background="black")
    assert np.array_equal(padded[16:32], image) and not padded[:16].any() and not padded[32:].any()
    stretched = imported(tmp_path, out, image, size=24, fit="stretch")
    assert (
        stretched[:, 4].tolist() == [[255, 0, 0]] * 24
        and stretched[:, 20].tolist() == [[0, 0, 255]] * 24
    )
    tall = imported(tmp_path, out, image.transpose(1, 0, 2), size=48, fit="pad")
    assert np.array_equal(tall[:, 16:32], image.transpose(1, 0, 2)) and (tall[:, :16] == 255).all()


def test_large_jpeg_is_reduced_without_aliasing(tmp_path, out):
    stripes = np.zeros((1024, 1024), np.uint8)
    stripes[:, ::2] = 255
    reduced = imported(tmp_path, out, saved(Image.fromarray(stripes), "JPEG", quality=95), size=32)
    assert np.abs(reduced.astype(int) - 127).max() <= 3


def test_grey_and_colour(packed, out):
    grey, colour = np.full((8, 8), 100, np.uint8), colours(1)[0]
    mixed = packed({"a.png": grey, "b.png": colour})
    with pytest.raises(
        UsageError, match="b.png is in colour, but .*a.png is grey: add --rgb or --grey"
    ):
        import_dataset(mixed, out)
    assert import_dataset(mixed, out, channels=3).shape == (2, 8, 8, 3)
    assert contents(out)[0][0, 0, 0].tolist() == [100, 100, 100]
    assert import_dataset(mixed, out, channels=1, force=True).shape == (2, 8, 8, 1)
    red, green, blue = colour[0, 0]
    assert (
        abs(int(contents(out)[0][1, 0, 0, 0]) - (0.299 * red + 0.587 * green + 0.114 * blue)) <= 1
    )


def test_colour_first_then_grey_needs_no_option(packed, out):
    assert (
        import_dataset(
            packed({"a.png": colours(1)[0], "b.png": np.full((8, 8), 9, np.uint8)}), out
        ).shape[3]
        == 3
    )


def test_sizes_that_differ(packed, out):
    source = packed({"a.png": colours(1)[0], "b.png": colours(1, 60)[0]})
    with pytest.raises(UsageError, match=r"b.png is 60×60 pixels, but .*a.png is 8×8: add --size"):
        import_dataset(source, out)
    assert import_dataset(source, out, size=16).shape == (2, 16, 16, 3)


def test_too_large(tmp_path, out):
    source = fill(tmp_path / "s", {"a.png": np.zeros((1100, 1100), np.uint8)})
    with pytest.raises(UsageError, match="1100×1100 pixels: add --size"):
        import_dataset(source, out)
    with pytest.raises(UsageError, match="--size 2000 is out of range"):
        import_dataset(source, out, size=2000)


def test_not_square(packed, out):
    """Pictures of one size keep it; of several proportions one must be given."""
    wide = {"a.png": np.zeros((16, 48, 3), np.uint8), "b.png": np.ones((16, 48, 3), np.uint8)}
    assert import_dataset(packed(wide), out).shape == (2, 16, 48, 3)
    with pytest.raises(
        UsageError,
        match="c.png is 16×16 pixels, but .*a.png is 48×16: add --size .* --size 16x64, and --fit",
    ):
        import_dataset(packed({**wide, "c.png": np.zeros((16, 16, 3), np.uint8)}), out, force=True)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    "height, width, size", [(70, 133, 16), (90, 31, 8), (20, 30, 24), (33, 64, 16)]
)
def test_adm_crop_halves_and_then_resizes(tmp_path, out, rng, height, width, size, form):
    """With the bits of guided-diffusion's crop: a JPEG is decoded at its whole size for it."""
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = saved(Image.fromarray(pixels), form)
    wanted = Image.open(io.BytesIO(data)).convert("RGB")
    for _ in range(int(np.log2(min(height, width) / size))):
        wanted = wanted.resize([n // 2 for n in wanted.size], Image.Resampling.BOX)
    ratio = size / min(wanted.size)
    wanted = np.asarray(
        wanted.resize([round(n * ratio) for n in wanted.size], Image.Resampling.BICUBIC)
    )
    top, left = ((n - size) // 2 for n in wanted.shape[:2])
    found = imported(tmp_path, out, data, size=size, crop="adm")
    assert np.array_equal(found, wanted[top : top + size, left : left + size])


def test_a_height_and_a_width(tmp_path, out):
    """Crop cuts the longer sides, pad adds bars at them; a square size keeps its bits."""
    columns = np.arange(96, dtype=np.uint8)
    picture = np.repeat(np.broadcast_to(columns, (48, 96))[..., None], 3, axis=2)
    cropped = imported(tmp_path, out, picture, size=(48, 64))
    assert np.array_equal(cropped, picture[:, 16:80])
    cropped = imported(tmp_path, out, picture, size=(24, 96))
    assert np.array_equal(cropped, picture[12:36])
    padded = imported(tmp_path, out, picture, size=(64, 96), fit="pad", background="black")
    assert np.array_equal(padded[8:56], picture) and not padded[:8].any() and not padded[56:].any()
    padded = imported(tmp_path, out, picture, size=(48, 100), fit="pad", background="black")
    assert np.array_equal(padded[:, 2:98], picture) and not padded[:, :2].any()
    assert imported(tmp_path, out, picture, size=(12, 50), fit="stretch").shape == (12, 50, 3)
    same = [imported(tmp_path, out, picture, size=size) for size in (20, (20, 20))]
    assert np.array_equal(*same)


def test_sizes_and_crops_that_cannot_be(tmp_path, out):
    picture = np.zeros((8, 8), np.uint8)
    for options, sentence in (
        ({"size": (0, 4)}, "--size 0x4 is out of range"),
        ({"size": (4, 8), "crop": "adm"}, "--crop adm makes squares, and --size is 4x8"),
        ({"crop": "adm"}, "--crop adm needs --size"),
        ({"size": 4, "crop": "adm", "fit": "pad"}, "--crop adm and --fit pad exclude each other"),
        ({"size": 4, "crop": "box"}, "--crop box is unknown: use one of lanczos, adm"),
    ):
        with pytest.raises(UsageError, match=sentence):
            imported(tmp_path, out, picture, **options)


@pytest.mark.parametrize("text, size", [("64", 64), ("48x64", (48, 64)), ("32×32", 32)])
def test_the_size_on_the_command_line(text, size):
    assert Size(1024).convert(text, None, None) == size


@pytest.mark.parametrize("text", ["x64", "64x", "1x2x3", "-4", "4.5", "0x4", "2048", "9" * 40])
def test_what_is_no_size_on_the_command_line(text):
    with pytest.raises(click.BadParameter):
        Size(1024).convert(text, None, None)
