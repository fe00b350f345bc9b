"""What `numdiff sample` reads and writes besides a grid: samples as npz, the denoising as a GIF or
APNG, masks."""

import contextlib
import io
import json
import pathlib
import struct
import zipfile
import zlib

import numpy as np
from PIL import Image

from .. import extensions
from ..errors import NumdiffError, UsageError
from ..files import atomic_file
from ..sizes import sides
from .report import image_grid

ANIMATIONS = (".gif", ".png", ".apng")
# how long a frame of an animation is shown, and the finished images
FRAME_SECONDS, LAST_SECONDS = 0.08, 2.0
SIDES = ("left", "right", "top", "bottom", "centre")  # masks that have a name


# Samples for evaluation ---------------------------------------------------------------------------


class ClosedByHand(zipfile.ZipFile):
    """An archive that an interrupt may leave unfinished: Python would close it later, with an error
    that is printed."""

    def __del__(self):
        pass


class SamplesFile:
    """An npz of samples that is written as they are made; only the last batch is ever in memory.

    arr_0     uint8 (N, H, W, 3), what public evaluators read; float32 (N, H, W, C) of a model of latents
    arr_1     int64 (N,), the classes, of a model with classes
    numdiff   text: how they were made, as JSON
    """

    def __init__(self, file, shape, dtype):
        """file: raw and binary; shape, dtype: of all samples."""
        self._file, self._zip = file, ClosedByHand(file, "w", zipfile.ZIP_STORED)
        self._grey = dtype == np.uint8 and shape[-1] == 1
        self._rows = self._zip.open("arr_0.npy", "w", force_zip64=True)
        self._shape, self._dtype = (*shape[:-1], 3) if self._grey else tuple(shape), np.dtype(dtype)
        self._rows.write(self._header(len(self)))

    def __len__(self):
        return self._shape[0]

    def _header(self, count):
        """NumPy's header of `count` samples: its length does not depend on the number, as NumPy
        leaves room for the digits."""
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (count, *self._shape[1:]),
            },
        )
        return header.getvalue()

    def write(self, images):
        """The next samples; a grey image is written with three equal channels."""
        images = np.repeat(images, 3, axis=-1) if self._grey else np.ascontiguousarray(images)
        self._rows.write(images.data)
        if hasattr(self._file, "check"):
            self._file.check()  # a full disk is reported now, not after hours of sampling

    def finish(self, labels, record, count=None):
        """After the last sample: classes (or None), and how the samples were made (a dict).

        count: how many were written, where it is fewer than were meant to be
        """
        self._rows.close()
        if count is not None and count < len(self):
            self._shorten(count)
            labels, record = (
                labels if labels is None else labels[:count],
                {**record, "count": count},
            )
        more = {} if labels is None else {"arr_1": labels.astype(np.int64)}
        for name, array in {**more, "numdiff": np.array(json.dumps(record))}.items():
            with self._zip.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        self._zip.close()

    def _shorten(self, count):
        """Set the samples' header to `count`, and the archive's checksum to match.

        The archive's own header of the member (APPNOTE.TXT of PKWARE, 4.3.7) has the checksum at
        byte 14, the lengths of name and extra field at bytes 26 and 28, and its data after them,
        from byte 30 on.
        """
        member, file = self._zip.getinfo("arr_0.npy"), self._file
        end = file.tell()
        file.seek(member.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
        file.seek(member.header_offset + 30 + name + extra)
        file.write(self._header(count))
        file.seek(member.header_offset + 30 + name + extra)
        left, member.CRC = member.file_size, 0
        while left:
            part = file.read(min(left, 1 << 24))
            member.CRC, left = zlib.crc32(part, member.CRC), left - len(part)
        file.seek(member.header_offset + 14)
        file.write(struct.pack("<I", member.CRC))
        file.seek(end)

    def close(self):
        """Release the archive, finished or not: otherwise Python does so later, with an error that
        cannot be caught."""
        for part in (self._rows, self._zip):
            with contextlib.suppress(OSError, ValueError):
                part.close()


@contextlib.contextmanager
def samples_file(path, shape, dtype):
    """A `SamplesFile` that appears under its name when the block ends well; None for no path."""
    if path is None:
        yield None
        return
    with atomic_file(path, "the samples") as file:
        with contextlib.closing(SamplesFile(file, shape, dtype)) as samples:
            yield samples


# The denoising as a moving picture ----------------------------------------------------------------


class Frames:
    """Some of a sampler's x_t, evenly spread over its evaluations, and the finished images as the
    last.

    count: images; shape: of one; evaluations: of the sampler for each batch; frames: at most,
    without the last
    """

    def __init__(self, count, shape, evaluations, frames):
        chosen = np.unique(np.linspace(0, evaluations - 1, min(frames, evaluations)).astype(int))
        self._place = {int(k): i for i, k in enumerate(chosen)}
        self.images = np.zeros((len(chosen) + 1, count, *shape), np.uint8)

    def watch(self, rows, k, read):
        """Before evaluation k of the images `rows`; read(): x_t as uint8."""
        if k in self._place and rows.start < self.images.shape[1]:
            rows = slice(rows.start, min(rows.stop, self.images.shape[1]))
            self.images[self._place[k], rows] = read()[: rows.stop - rows.start]

    def save(self, path, final, columns=None, zoom=1, info=None):
        """Write a .gif (256 colours) or an animated .png or .apng (all of them), looping, the last
        frame for longer.

        final: the finished images, fewer than were to be made where the sampling was stopped;
        info: a `PngInfo` for a PNG
        """
        grids = [
            image_grid(images, columns, zoom=zoom)
            for images in (*self.images[:-1, : len(final)], final)
        ]
        pictures = [
            Image.fromarray(grid[..., 0] if grid.shape[-1] == 1 else grid) for grid in grids
        ]
        durations = [round(1000 * FRAME_SECONDS)] * (len(pictures) - 1) + [
            round(1000 * LAST_SECONDS)
        ]
        gif = pathlib.Path(path).suffix.lower() == ".gif"
        with atomic_file(path, "the animation") as file:
            pictures[0].save(
                file,
                "GIF" if gif else "PNG",
                save_all=True,
                append_images=pictures[1:],
                duration=durations,
                loop=0,
                **({} if gif else {"pnginfo": info}),
            )


# Inpainting ---------------------------------------------------------------------------------------


def read_picture(path, shape):
    """A picture as float32 of `shape` (H, W, C) in [-1, 1], of whose proportions it must be:
    resized, upright, transparent parts white."""
    with _opened(path) as picture:
        _check_proportions(path, picture, shape)
        picture = picture.convert("L" if shape[2] == 1 else "RGB")
        if picture.size != (shape[1], shape[0]):
            picture = picture.resize((shape[1], shape[0]), Image.Resampling.LANCZOS)
        pixels = np.asarray(picture, np.float32).reshape(shape)
    return pixels / np.float32(127.5) - 1


def _check_proportions(what, picture, shape):
    """Raise a `UsageError` for a picture whose proportions are not those of `shape` (H, W, …), but
    for the rounding of its sides to whole pixels."""
    height, width = shape[:2]
    if abs(picture.width * height - picture.height * width) > max(height, width):
        raise UsageError(
            f"{what} has {picture.height}×{picture.width} pixels, height × width, and the model makes "
            f"images of {height}×{width}: crop it to these proportions first."
        )


def read_mask(name, size):
    """Float32 (height, width) of an image's size, 1 where pixels are kept: from a picture (black is
    kept, white generated) or a side's name.

    A side or "centre" is the half of the picture that is generated (of the centre: half its width
    and height).
    """
    height, width = sides(size)
    mask = np.ones((height, width), np.float32)
    if name in SIDES:
        rows, columns = (slice(n // 4, n // 4 + n // 2) for n in (height, width))
        made = {
            "left": np.s_[:, : width // 2],
            "right": np.s_[:, width // 2 :],
            "top": np.s_[: height // 2],
            "bottom": np.s_[height // 2 :],
            "centre": np.s_[rows, columns],
        }[name]
        mask[made] = 0
        return mask
    with _opened(name, f" (or give one of {', '.join(SIDES)})") as picture:
        _check_proportions(f"the mask {name}", picture, (height, width))
        picture = picture.convert("L").resize((width, height), Image.Resampling.BOX)
        return (np.asarray(picture) < 128).astype(np.float32)


@contextlib.contextmanager
def _opened(path, hint=""):
    pictures = extensions.find("pictures", "files", path)
    try:
        with pictures.open_picture(path) as picture:
            yield pictures.flatten(picture, (255, 255, 255))
    except FileNotFoundError:
        raise UsageError(f"there is no picture {path}: check the path{hint}.") from None
    except (pictures.Unreadable, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NumdiffError(f"{path} cannot be read ({reason}): give a PNG or JPEG{hint}.") from None
