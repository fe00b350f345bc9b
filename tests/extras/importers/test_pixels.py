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
from numdiff.errors import NumdiffError
from numdiff.extras.evaluate.sources import open_source
from numdiff.extras.importers.pictures import decoded
from numdiff.training.sample_files import read_mask, read_picture
from tests.extras.importers.sources import (
    ADOBE,
    SRGB,
    colours,
    fill,
    icc,
    png,
    png_of_rows,
    saved,
    tiff,
)


@pytest.fixture
def pixels_of(imported):
    """pixels_of(data, **options): the one image of a folder that holds one file of these bytes."""
    return lambda data, **options: imported({"a.png": data}, **options).images[0]


def difference(found, expected):
    """The largest one."""
    return np.abs(found.astype(float) - expected).max()


def blocks(rng, channels):
    """16 × 16 random pixels, of one colour in each quarter."""
    quarters = rng.integers(0, 256, (2, 2, channels), np.uint8)
    return quarters.repeat(8, 0).repeat(8, 1)


def test_16_bit_pixels(pixels_of):
    values = np.array([[0, 128, 257, 65535], [32768, 65278, 300, 1]] * 2, np.uint16)
    expected = np.rint(values / 257).astype(np.uint8)
    assert np.array_equal(pixels_of(values)[..., 0], expected)
    tiff = saved(Image.fromarray(values), "TIFF")
    assert np.array_equal(pixels_of(tiff)[..., 0], expected)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_16_bit_colour_is_rounded(pixels_of, rng, channels):
    """Pillow truncates it. What is transparent is so to the last bit."""
    square = rng.integers(0, 65536, (5, 5, channels), np.uint16)
    square[0, :3, 0] = 127, 128, 129
    if channels != 3:
        square[..., -1] = 65535  # opaque
    shown = np.rint(square / 257).astype(np.uint8)[..., : channels - (channels != 3)]
    assert np.array_equal(pixels_of(png(square)), shown)
    if channels == 2:
        return
    for order in "<>":
        for compressed in (False, True):
            found = pixels_of(tiff(square, order, compressed, 2 if channels == 4 else None))
            assert np.array_equal(found, shown), (order, compressed)


def test_16_bit_colour_that_is_transparent(pixels_of):
    """The transparent colour of a PNG is compared in 16 bits: its neighbour of the same 8 bits is
    opaque."""
    row = struct.pack(">6H", 514, 771, 1028, 515, 771, 1028)
    data = png_of_rows([row] * 2, 2, 16, 2, tRNS=row[:6])
    assert pixels_of(data).tolist() == [[[255, 255, 255], [2, 3, 4]]] * 2
    alpha = np.zeros((2, 2, 4), np.uint16)
    alpha[..., 0], alpha[..., 3] = 65535, 32896
    assert pixels_of(png(alpha), background="black")[0, 0].tolist() == [128, 0, 0]


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
    pixels_of, width, height, size, fit, orientation
):
    """Decoded at 1/2 to 1/8, also where that gives no whole number of pixels, and whichever side is
    up."""
    pixels = np.rint(smooth(width, height)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg = saved(Image.fromarray(pixels), "JPEG", quality=100, subsampling=0, exif=exif)
    with decoded(len(jpeg), lambda: jpeg, size) as image:
        assert max(image.size) <= 300
    png = saved(Image.fromarray(pixels), "PNG", exif=exif)
    options = {"size": size, "fit": fit, "background": "black"}
    found, whole = (pixels_of(data, **options).astype(float) for data in (jpeg, png))
    off = (found - whole).mean((0, 1)) / (255 / size)  # in pixels of the result, about
    assert np.abs(off[:2]).max() < 0.05
    assert difference(found[1:-1, 1:-1], whole[1:-1, 1:-1]) <= 2


@pytest.mark.parametrize("size, scale", [(64, 4), (128, 2), (32, 8)])
def test_a_reduced_jpeg_is_near_the_whole_one(pixels_of, rng, size, scale):
    """On noise with the spectrum of photos, 1/f: 48 dB here, up to 57 in larger pictures."""
    frequencies = np.hypot(np.fft.fftfreq(523)[:, None], np.fft.fftfreq(700)[None])
    frequencies[0, 0] = 1
    noise = np.fft.ifft2(np.fft.fft2(rng.standard_normal((523, 700))) / frequencies).real
    noise = (255 * (noise - noise.min()) / np.ptp(noise)).astype(np.uint8)
    jpeg = saved(Image.fromarray(noise), "JPEG", quality=92)
    with decoded(len(jpeg), lambda: jpeg, size) as image:
        assert image.width == -(-700 // scale)
    whole = saved(Image.open(io.BytesIO(jpeg)), "PNG")
    found, wanted = (pixels_of(data, size=size).astype(float) for data in (jpeg, whole))
    assert 10 * np.log10(255**2 / ((found - wanted) ** 2).mean()) > 46


def test_only_the_crop_is_seen(pixels_of):
    """The picture has another colour outside the middle square, which reaches half a reduced pixel
    inwards at most."""
    image = np.zeros((512, 1030, 3), np.uint8)
    image[:, 259:771] = 200
    assert (pixels_of(image, size=32) == 200).all()
    jpeg = saved(Image.fromarray(image), "JPEG", quality=100, subsampling=0)
    found = pixels_of(jpeg, size=32)
    assert difference(found[:, 2:-2], 200) <= 2 and found.min() > 150


# Colour profiles ----------------------------------------------------------------------------------


def in_srgb(pixels, matrix, gamma=2.2):
    """float64 in 0 … 255: the same colours in sRGB, by the formulas of IEC 61966-2-1."""
    linear = np.clip((pixels / 255.0) ** gamma @ (np.linalg.inv(SRGB) @ matrix).T, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def check_other_readers(folder, pixels):
    """Sampling and evaluation read the one picture of a folder alike."""
    picture = read_picture(folder / "a.png", pixels.shape)
    assert np.allclose((picture + 1) * 127.5, pixels, atol=1e-3)
    found = next(iter(open_source(folder).batches(1)))[0]
    assert np.array_equal(found, np.broadcast_to(pixels, found.shape))


@pytest.mark.parametrize(
    "form, options",
    [
        ("PNG", {}),
        ("TIFF", {}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"quality": 100, "subsampling": 0}),
    ],
)
def test_colour_profiles(imported, tmp_path, rng, form, options):
    pixels = blocks(rng, 3)

    def of_profile(profile):
        data = saved(Image.fromarray(pixels), form, icc_profile=profile, **options)
        found = imported({"a.png": data})
        return found.images[0], found.report.notes

    plain, _ = of_profile(None)
    for profile in (None, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()):
        same, notes = of_profile(profile)
        assert np.array_equal(same, plain) and notes == []
    found, notes = of_profile(icc(ADOBE))
    assert difference(found, in_srgb(pixels, ADOBE)) < (6 if form == "JPEG" else 1.5)
    assert notes == ["1 image was converted to sRGB from the colour profile in the file (a.png)."]
    check_other_readers(tmp_path / "folder", found)


def test_profiles_of_other_pixels(pixels_of, rng):
    """Transparent, grey, of a palette, of 16 bits, on its side."""
    pixels = blocks(rng, 4)
    pixels[:, 8:, 3], pixels[:, :8, 3] = 0, 255
    adobe = icc(ADOBE)
    found = pixels_of(saved(Image.fromarray(pixels), "PNG", icc_profile=adobe), background="red")
    colour = pixels[..., :3]
    expected = in_srgb(colour, ADOBE)
    assert difference(found[:, :8], expected[:, :8]) < 1.5 and (found[:, 8:] == [255, 0, 0]).all()
    palette = Image.fromarray(colour).quantize(4)
    found = pixels_of(saved(palette, "PNG", icc_profile=adobe))
    assert difference(found, in_srgb(np.asarray(palette.convert("RGB")), ADOBE)) < 1.5
    rows = [row.tobytes() for row in colour.astype(">u2") * 257]
    deep = png_of_rows(rows, 16, 16, 2, iCCP=b"a\0\0" + zlib.compress(adobe))
    assert difference(pixels_of(deep), expected) < 1.5
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = saved(Image.fromarray(colour), "PNG", icc_profile=adobe, exif=exif)
    assert difference(pixels_of(turned), np.rot90(expected, -1)) < 1.5
    grey = np.tile(np.arange(0, 256, 16, dtype=np.uint8), (16, 1))
    expected = in_srgb(np.stack([grey] * 3, -1), SRGB, 1.0)[..., :1]
    for profile in (icc(gamma=1.0, space=b"GRAY"), icc(SRGB, gamma=1.0)):
        for values in (grey, grey.astype(np.uint16) * 257):
            found = pixels_of(saved(Image.fromarray(values), "PNG", icc_profile=profile))
            assert found.shape == (16, 16, 1) and difference(found, expected) < 1.5


def test_a_profile_of_inks(pixels_of):
    """CMYK by its profile, here L* = 100 (1 - c)(1 - m)(1 - y)(1 - k); without one by Pillow's
    formula."""
    inks = np.zeros((8, 8, 4), np.uint8)
    inks[4:, :, 3], inks[:, 4:, 0] = 128, 255
    image = Image.fromarray(inks, "CMYK")
    profile = icc(space=b"CMYK", kind=b"prtr")
    found = pixels_of(saved(image, "TIFF", icc_profile=profile))
    lightness = 100 * (1 - 128 / 255)
    luminance = ((lightness + 16) / 116) ** 3
    grey = 255 * (1.055 * luminance ** (1 / 2.4) - 0.055)
    assert found[0, 0].min() >= 254 and found[0, 7].max() <= 1
    assert difference(found[7, 0], grey) < 2
    assert pixels_of(saved(image, "TIFF"))[0, 7].tolist() == [0, 255, 255]


def test_profiles_in_threads(imported, rng):
    """One transform serves all threads, and each picture is converted by its own."""
    pixels = rng.integers(0, 256, (60, 4, 4, 3), np.uint8)
    profiles = [icc(ADOBE), icc(SRGB, gamma=1.0), None]
    found = imported(
        {
            f"{i:02d}.png": saved(Image.fromarray(image), "PNG", icc_profile=profiles[i % 3])
            for i, image in enumerate(pixels)
        }
    )
    assert difference(found.images[::3], in_srgb(pixels[::3], ADOBE)) < 1.5
    assert difference(found.images[1::3], in_srgb(pixels[1::3], SRGB, 1.0)) < 1.5
    assert np.array_equal(found.images[2::3], pixels[2::3])
    assert found.report.notes == [
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
def test_profiles_that_cannot_be_used(imported, profile):
    """The picture is as without it, and the report says so."""
    pixels = colours(1, 16)[0]
    found = imported({"a.png": saved(Image.fromarray(pixels), "TIFF", icc_profile=profile)})
    assert np.array_equal(found.images[0], pixels)
    assert found.report.notes == [
        "1 image was taken for sRGB, as the colour profile cannot be used (a.png)."
    ]


def test_palette_with_transparency(pixels_of):
    colours = {"PLTE": bytes([255, 0, 0, 0, 255, 0, 0, 0, 255])}
    clear = {**colours, "tRNS": bytes([255, 0, 255])}  # the second colour
    for chunks, options, second in (
        (colours, {}, [0, 255, 0]),
        (clear, {}, [255, 255, 255]),
        (clear, {"background": "navy"}, [0, 0, 128]),
    ):
        found = pixels_of(png_of_rows([b"\0\1", b"\2\0"], 2, kind=3, **chunks), **options)
        assert found.tolist() == [[[255, 0, 0], second], [[0, 0, 255], [255, 0, 0]]]


def test_alpha_over_a_colour(pixels_of, refused):
    image = np.zeros((2, 2, 4), np.uint8)
    image[..., 0], image[..., 3] = 200, [[255, 128], [0, 0]]
    opaque, half, clear, _ = pixels_of(image).reshape(4, 3)
    assert opaque.tolist() == [200, 0, 0] and clear.tolist() == [255, 255, 255]
    assert difference(half, [228, 127, 127]) <= 1
    assert pixels_of(image, background="#102030")[1, 0].tolist() == [16, 32, 48]
    grey = image[..., [0, 3]]
    assert pixels_of(grey)[..., 0].tolist()[1] == [255, 255]
    assert pixels_of(grey, background="red")[1, 0].tolist() == [255, 0, 0]
    refused({"a.png": image}, "--background 'whitish' is not a colour", background="whitish")


def test_transparent_grey(pixels_of):
    """Of 16 bits, and of fewer than 8: one channel over grey, three over a colour; opaque pixels as
    without alpha."""
    values = np.array([[0, 514], [32896, 65535]], np.uint16)
    deep = [row.astype(">u2").tobytes() for row in values]

    def clear(value, rows=deep, depth=16):
        return png_of_rows(rows, 2, depth, tRNS=struct.pack(">H", value))

    for data, options, expected in (
        (clear(514), {}, [[0, 255], [128, 255]]),
        (clear(514), {"background": "black"}, [[0, 0], [128, 255]]),
        (clear(515), {}, [[0, 2], [128, 255]]),
        (clear(1, [b"\x10", b"\xb0"], 2), {}, [[0, 255], [170, 255]]),
        (clear(10, [b"\x0a", b"\x0f"], 4), {}, [[0, 255], [0, 255]]),
        (clear(1, [b"\x40", b"\x80"], 1), {}, [[0, 255], [255, 0]]),
    ):
        found = pixels_of(data, **options)
        assert found.shape == (2, 2, 1) and found[..., 0].tolist() == expected
    assert pixels_of(clear(514), background="red").tolist() == [
        [[0, 0, 0], [255, 0, 0]],
        [[128, 128, 128], [255, 255, 255]],
    ]
    alpha = png(np.stack([values, [[65535, 65535], [65535, 0]]], -1).astype(np.uint16))
    assert pixels_of(alpha)[..., 0].tolist() == [[0, 2], [128, 255]]
    assert pixels_of(alpha, background="black").shape == (2, 2, 1)
    assert pixels_of(alpha, background="red")[1, 1].tolist() == [255, 0, 0]


def test_postscript_under_another_name(imported, tmp_path, monkeypatch):
    """No reader of the picture starts Ghostscript."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    path = fill(tmp_path / "s", {"a.png": eps}) / "a.png"
    for read in (
        lambda: imported(tmp_path / "s"),
        lambda: read_picture(path, (8, 8, 3)),
        lambda: read_mask(str(path), 8),
        lambda: open_source(tmp_path / "s"),
    ):
        with pytest.raises(NumdiffError, match="not an image that Pillow can read"):
            read()
    assert not (tmp_path / "started").exists()


def test_picture_is_read_alike_everywhere(pixels_of, tmp_path):
    values = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))
    found = pixels_of(values)
    assert len(np.unique(found)) == 16
    check_other_readers(tmp_path / "folder", found)


def test_cmyk_one_bit_and_gif(pixels_of):
    cmyk = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    assert difference(pixels_of(cmyk), [255, 0, 0]) <= 6
    bits = saved(Image.fromarray(np.eye(8, dtype=bool)), "PNG")
    assert np.array_equal(pixels_of(bits)[..., 0], 255 * np.eye(8, dtype=np.uint8))
    blue, red = (Image.new("RGB", (8, 8), colour) for colour in ("blue", "red"))
    gif = saved(blue, "GIF", save_all=True, append_images=[red])
    assert pixels_of(gif)[0, 0].tolist() == [0, 0, 255]


def test_float_pixels_are_refused_by_name(refused):
    data = saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    refused({"a.png": data}, "a.png: floating-point pixels", NumdiffError)


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
def test_exif_orientation(pixels_of, orientation, turned):
    image = np.zeros((16, 16, 3), np.uint8)
    image[:8, :8], image[:8, 8:] = 255, (255, 0, 0)
    exif = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    options = {"quality": 100, "subsampling": 0, "exif": b"Exif\0\0" + exif}
    found = pixels_of(saved(Image.fromarray(image), "JPEG", **options))
    assert difference(found, turned(image)) < 8


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"size": (48, 48)}, lambda a: a[:, 24:72]),
        ({"size": (48, 64)}, lambda a: a[:, 16:80]),
        ({"size": (24, 96)}, lambda a: a[12:36]),
        ({"size": (96, 96), "fit": "pad"}, lambda a: np.pad(a, ((24, 24), (0, 0), (0, 0)))),
        ({"size": (64, 96), "fit": "pad"}, lambda a: np.pad(a, ((8, 8), (0, 0), (0, 0)))),
        ({"size": (48, 100), "fit": "pad"}, lambda a: np.pad(a, ((0, 0), (2, 2), (0, 0)))),
    ],
)
def test_crop_and_pad(pixels_of, rng, options, expected):
    """Crop cuts the longer sides, pad adds bars at them; likewise where the picture is tall."""
    picture = rng.integers(0, 256, (48, 96, 3), np.uint8)
    for turned in (lambda a: a, lambda a: a.swapaxes(0, 1)):
        size = options["size"] if turned(picture).shape == picture.shape else options["size"][::-1]
        found = pixels_of(turned(picture), **{**options, "size": size}, background="black")
        assert np.array_equal(found, turned(expected(picture)))


def test_stretch_and_square_sizes(pixels_of):
    image = np.zeros((16, 48, 3), np.uint8)
    image[:, :16, 0] = image[:, 16:32, 1] = image[:, 32:, 2] = 255
    stretched = pixels_of(image, size=24, fit="stretch")
    assert (stretched[:, 4] == [255, 0, 0]).all() and (stretched[:, 20] == [0, 0, 255]).all()
    assert pixels_of(image, size=(12, 50), fit="stretch").shape == (12, 50, 3)
    assert np.array_equal(pixels_of(image, size=8), pixels_of(image, size=(8, 8)))
    assert (pixels_of(image, size=48, fit="pad")[:16] == 255).all()  # white without --background


def test_large_jpeg_is_reduced_without_aliasing(pixels_of):
    stripes = np.zeros((1024, 1024), np.uint8)
    stripes[:, ::2] = 255
    reduced = pixels_of(saved(Image.fromarray(stripes), "JPEG", quality=95), size=32)
    assert difference(reduced, 127) <= 3


def test_grey_and_colour(imported, refused, packed):
    grey, colour = np.full((8, 8), 100, np.uint8), colours(1)[0]
    mixed = packed({"a.png": grey, "b.png": colour})
    refused(mixed, "b.png is in colour, but .*a.png is grey: add --rgb or --grey")
    found = imported(mixed, channels=3).images
    assert found.shape == (2, 8, 8, 3) and (found[0] == 100).all()
    found = imported(mixed, channels=1).images
    assert found.shape == (2, 8, 8, 1)
    assert difference(found[1], colour[0, 0] @ [0.299, 0.587, 0.114]) <= 1


def test_colour_first_then_grey_needs_no_option(imported, packed):
    files = {"a.png": colours(1)[0], "b.png": np.full((8, 8), 9, np.uint8)}
    assert imported(packed(files)).images.shape == (2, 8, 8, 3)


def test_sizes_that_differ(imported, refused, packed):
    source = packed({"a.png": colours(1)[0], "b.png": colours(1, 60)[0]})
    refused(source, r"b.png is 60×60 pixels, but .*a.png is 8×8: add --size")
    assert imported(source, size=16).images.shape == (2, 16, 16, 3)


def test_too_large(refused):
    source = {"a.png": np.zeros((1100, 1100), np.uint8)}
    refused(source, "1100×1100 pixels: add --size")
    refused(source, "--size 2000 is out of range", size=2000)


def test_not_square(imported, refused, packed):
    """Pictures of one size keep it; of several proportions one must be given."""
    wide = {"a.png": np.zeros((16, 48, 3), np.uint8), "b.png": np.ones((16, 48, 3), np.uint8)}
    assert imported(packed(wide)).images.shape == (2, 16, 48, 3)
    refused(
        packed({**wide, "c.png": np.zeros((16, 16, 3), np.uint8)}),
        "c.png is 16×16 pixels, but .*a.png is 48×16: add --size .* --size 16x64, and --fit",
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    "height, width, size", [(70, 133, 16), (90, 31, 8), (20, 30, 24), (33, 64, 16)]
)
def test_adm_crop_halves_and_then_resizes(pixels_of, rng, height, width, size, form):
    """With the bits of guided-diffusion's crop: a JPEG is decoded at its whole size for it."""
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = saved(Image.fromarray(pixels), form)
    wanted = Image.open(io.BytesIO(data)).convert("RGB")
    for _ in range(int(np.log2(min(height, width) / size))):
        wanted = wanted.resize([n // 2 for n in wanted.size], Image.Resampling.BOX)
    ratio = size / min(wanted.size)
    sides = [round(n * ratio) for n in wanted.size]
    wanted = np.asarray(wanted.resize(sides, Image.Resampling.BICUBIC))
    top, left = ((n - size) // 2 for n in wanted.shape[:2])
    found = pixels_of(data, size=size, crop="adm")
    assert np.array_equal(found, wanted[top : top + size, left : left + size])


def test_sizes_and_crops_that_cannot_be(refused):
    picture = np.zeros((8, 8), np.uint8)
    for options, sentence in (
        ({"size": (0, 4)}, "--size 0x4 is out of range"),
        ({"size": (4, 8), "crop": "adm"}, "--crop adm makes squares, and --size is 4x8"),
        ({"crop": "adm"}, "--crop adm needs --size"),
        ({"size": 4, "crop": "adm", "fit": "pad"}, "--crop adm and --fit pad exclude each other"),
        ({"size": 4, "crop": "box"}, "--crop box is unknown: use one of lanczos, adm"),
    ):
        refused({"a.png": picture}, sentence, **options)


@pytest.mark.parametrize("text, size", [("64", 64), ("48x64", (48, 64)), ("32×32", 32)])
def test_the_size_on_the_command_line(text, size):
    assert Size(1024).convert(text, None, None) == size


@pytest.mark.parametrize("text", ["x64", "64x", "1x2x3", "-4", "4.5", "0x4", "2048", "9" * 40])
def test_what_is_no_size_on_the_command_line(text):
    with pytest.raises(click.BadParameter):
        Size(1024).convert(text, None, None)
