"""What a run shows and writes: a line or bar for each report, stats.jsonl, grids of images."""

import contextlib
import io
import json
import math
import os
import pathlib
import sys
import time
from array import array

import numpy as np
from PIL import Image

from .. import schema
from ..errors import NumdiffError
from ..files import atomic_file, cannot_write, check_target, open_regular, open_to_append, write_all
from ..progress_bar import duration, progress_bar, three_digits
from .picture_record import chunk_of

STATS = "stats.jsonl"
MAX_LINE = 32 << 20  # bytes of a record, which holds the losses of a million steps
MAX_STEPS = 1 << 24  # steps of which the losses are held in memory
LOSS = schema.optional(schema.number(-1e300, 1e300))  # null: not finite
RECORD = schema.record(
    {"step": schema.integer(0, 2**32), "loss": LOSS},
    {"losses": schema.items(LOSS, 1 << 21)},
    schema.anything,
)
SMOOTHING = 0.7  # weight of the old step time in the estimate of the time left


# Lines --------------------------------------------------------------------------------------------


class RunOutput:
    """Prints lines on stdout, and never makes a run fail.

    A line that cannot be written, for example to a full disk, is lost, and the next one is tried.
    When no reader is left any more (a pipe into `head`), `closed` is set, so that the run can stop
    in order.
    """

    def __init__(self, write=None):
        self.closed = False
        self._write = write or (lambda text: print(text, flush=True))

    def __call__(self, text):
        if not self.closed:
            try:
                self._write(text)
            except OSError as error:
                self.closed = isinstance(error, BrokenPipeError)
                discard(sys.stdout, for_good=self.closed)


def discard(stream, for_good=False):
    """Discard what a stream could not write, which Python would try again, and fail, at every later
    line and at exit. for_good: discard all that is written to it from now on, too."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file, or closed
        handle = stream.fileno()
        kept, nowhere = os.dup(handle), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, handle)
            stream.flush()
            if not for_good:
                os.dup2(kept, handle)
        finally:
            os.close(kept)
            os.close(nowhere)


# The reporter -------------------------------------------------------------------------------------


class Reporter:
    """Reports a run's progress: a bar if stderr is a terminal, else plain lines on stdout; always
    stats.jsonl.

        with Reporter(run_dir, steps=400, batch=32) as reporter:
            …
            reporter.report(step, losses, gradient_norm, learning_rate)     # every log_every steps

    run_dir: where stats.jsonl goes; steps: of the whole run; batch: images a step
    start_step: steps done before this process; records of later steps, of a run that was killed,
    are removed
    flops_per_step, peak_flops: for the MFU; without a known peak the TFLOP/s are shown instead
    output: an `RunOutput` for the lines
    """

    def __init__(
        self,
        run_dir,
        steps,
        batch,
        start_step=0,
        flops_per_step=None,
        peak_flops=None,
        bar=None,
        output=None,
    ):
        self.steps, self.batch, self.step = steps, batch, start_step
        self._output = output or RunOutput()
        self.flops_per_step, self.peak_flops = flops_per_step, peak_flops
        self._path = pathlib.Path(run_dir) / STATS
        truncate_stats(self._path, start_step)
        self._file = open_to_append(self._path, "the records")
        self._bar = progress_bar(steps, "training", "step", start_step, keep=True, shown=bar)
        self._reports = 0
        self._seconds = math.nan  # a step, smoothed
        self._started = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def report(self, step, losses, gradient_norm, learning_rate, **more):
        """After `step` steps: the losses of the steps since the last report (or one number); `more`
        is recorded too."""
        losses = [float(v) for v in np.atleast_1d(losses)]
        now = time.perf_counter()
        count = max(step - self.step, 1)
        seconds = (now - self._started) / count
        # the first report's steps compile kernels: its time is dropped
        keep = SMOOTHING if self._reports > 1 else 0.0
        self._seconds = keep * (self._seconds if keep else 0.0) + (1 - keep) * seconds
        self._reports += 1
        self.step, self._started = step, now
        # a skipped step's may have overflowed
        known = [v for v in losses if math.isfinite(v)] or losses
        record = {
            "step": step,
            "loss": sum(known) / len(known),
            "gradient_norm": float(gradient_norm),
            "learning_rate": float(learning_rate),
            "ms_per_step": seconds * 1e3,
            "images_per_second": self.batch / seconds,
            **more,
            "losses": losses,
        }
        if self.flops_per_step:
            record["tflops"] = self.flops_per_step / seconds / 1e12
            if self.peak_flops:
                record["mfu"] = self.flops_per_step / seconds / self.peak_flops
        self._write(record)
        self._show(record)
        return record

    @contextlib.contextmanager
    def pause(self, doing=""):
        """Time spent inside (samples, checkpoints) does not count as time of the steps; doing: a
        description for the bar."""
        start, note = time.perf_counter(), self._bar.note
        if doing:
            self._bar.to(self.step, doing, self._seconds)
        yield
        self._started += time.perf_counter() - start
        if doing:
            self._bar.to(self.step, note, self._seconds)

    def message(self, text):
        """A line of text above the bar or between the lines."""
        if self._bar.disable:
            self._output(text)
        else:
            self._bar.message(text)

    def close(self):
        self._bar.close()
        self._file.close()

    def _write(self, record):
        try:
            write_all(
                self._file, (json.dumps({k: _json(v) for k, v in record.items()}) + "\n").encode()
            )
        except OSError as error:
            raise cannot_write("the records", self._path, error) from error

    def _show(self, record):
        scale = ""
        if record.get("skipped") and "loss_scale" in record:
            scale = f"scale 2^{math.log2(record['loss_scale']):.3g}, {record['skipped']} skipped"
        if not self._bar.disable:
            note = f"loss {record['loss']:.4f}" + (
                f"  {record['skipped']} skipped" if scale else ""
            )
            self._bar.to(record["step"], note, self._seconds)
            return
        values = [
            f"loss {record['loss']:.4f}",
            f"norm {record['gradient_norm']:.3f}",
            f"lr {record['learning_rate']:.2e}",
            f"{three_digits(record['ms_per_step'])} ms/step",
            f"{three_digits(record['images_per_second'])} images/s",
            *([scale] if scale else []),
        ]
        if "mfu" in record:
            values.append(f"MFU {record['mfu']:.1%}")
        elif "tflops" in record:
            values.append(f"{record['tflops']:.3g} TFLOP/s")
        # the first report's steps, some of which compile kernels, would foretell too much
        if self._reports > 1:
            values.append(f"ETA {duration((self.steps - record['step']) * self._seconds)}")
        width = len(str(self.steps))
        self._output(f"step {record['step']:{width}d}/{self.steps}  " + "  ".join(values))


def _json(value):
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, list):
        return [_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def truncate_stats(path, step):
    """Remove from stats.jsonl the lines after `step`, and a line that a kill left half-written, so
    that no step is in it twice."""
    try:
        check_target("the records", path)
        end = at = 0
        for line in _lines(path):
            at += len(line)
            record = parse_record(line)
            if record is not None and record["step"] > step:
                break
            if record is not None:
                end = at
        if end < os.path.getsize(path):
            os.truncate(path, end)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise cannot_write("the records", path, error) from error


def read_stats(run_dir):
    """(steps, losses) of every step in a run's stats.jsonl, as two lists; step k is the k-th,
    counted from 1.

    Of very many steps only the newest. Lines that are not records are skipped: a kill may have cut
    one, which must not make a run fail.
    """
    steps, losses, path = array("q"), array("d"), pathlib.Path(run_dir) / STATS
    try:
        for record in filter(None, map(parse_record, _lines(path))):
            values = record.get("losses", [record["loss"]])
            steps.extend(range(record["step"] - len(values) + 1, record["step"] + 1))
            losses.extend(math.nan if v is None else v for v in values)
            if len(steps) > MAX_STEPS:
                del steps[: len(steps) // 2], losses[: len(losses) // 2]
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NumdiffError(
            f"cannot read the records {path}: {error.strerror}; move it out of the run folder."
        ) from error
    return steps.tolist(), losses.tolist()


def read_records(run_dir):
    """(records, damaged, partial) of a run's stats.jsonl, in the order of their steps.

    damaged: how many of its lines are no records; partial: whether it ends within a line, as it
    does while a record is being written, or after a kill.
    """
    records, damaged, partial, path = [], 0, False, pathlib.Path(run_dir) / STATS
    try:
        for line in _lines(path):
            partial = not line.endswith(b"\n")
            record = parse_record(line)
            if record is not None and (not records or record["step"] > records[-1]["step"]):
                records.append(record)
            else:
                damaged += not partial
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NumdiffError(
            f"cannot read the records {path}: {error.strerror}; move it out of the run folder."
        ) from error
    return records, damaged, partial


def _lines(path):
    """The lines of a file with their ends; one that is longer than any record comes in parts."""
    with open_regular(path) as raw, io.BufferedReader(raw, 1 << 20) as file:
        while line := file.readline(MAX_LINE):
            yield line


def parse_record(line):
    """The record of a line of stats.jsonl; None if it is incomplete, or no record."""
    try:
        record = schema.check(schema.parse_json(line), RECORD, "the record")
    except schema.Mismatch:
        return None
    few = len(record.get("losses", ())) <= record["step"]
    return record if line.endswith(b"\n") and few else None


# Pictures -----------------------------------------------------------------------------------------


def columns_of(model):
    """How many columns a grid has, one a class; None if there are no classes, or too many."""
    return model.num_classes if model.num_classes and model.num_classes <= 12 else None


def image_grid(images, columns=None, gap=2, zoom=1, background=255):
    """One picture of uint8 images (N, H, W, C): row by row in `columns` columns (default: about
    square).

    gap: pixels of background between the images; zoom: whole factor by which each pixel is
    enlarged.
    """
    images = np.asarray(images)
    if images.ndim != 4 or images.dtype != np.uint8 or not len(images):
        raise ValueError(
            f"image_grid takes uint8 images (N, H, W, C) with N ≥ 1, not {images.dtype} {images.shape}"
        )
    images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    N, H, W, C = images.shape
    columns = min(columns or math.ceil(math.sqrt(N)), N)
    rows = -(-N // columns)
    cells = np.full((rows * columns, H + gap, W + gap, C), background, np.uint8)
    cells[:N, :H, :W] = images
    grid = cells.reshape(rows, columns, H + gap, W + gap, C).transpose(0, 2, 1, 3, 4)
    grid = grid.reshape(rows * (H + gap), columns * (W + gap), C)
    return np.pad(
        grid[: rows * (H + gap) - gap, : columns * (W + gap) - gap],
        ((gap, gap), (gap, gap), (0, 0)),
        constant_values=background,
    )


def save_png(path, array, record=None):
    """Write uint8 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) as a PNG, atomically. record: how it
    was made, for JSON."""
    array = np.asarray(array)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in (3, 4))
    ):
        raise ValueError(
            f"save_png takes uint8 (H, W) or (H, W, C), C of 1, 3 or 4, not {array.dtype} {array.shape}"
        )
    with atomic_file(path, "the picture") as file:
        Image.fromarray(np.ascontiguousarray(array)).save(
            file, "PNG", pnginfo=record and chunk_of(record)
        )
