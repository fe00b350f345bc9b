"""What `numdiff sample` does: images from a run, a checkpoint or a converted model, as a grid, an
npz, an animation."""

import itertools
import os
import sys
import time
import unicodedata
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import extensions
from ..device import download
from ..diffusion import Sampling
from ..diffusion.inversion import images_of
from ..diffusion.pictures import as_in_training, in_place_of
from ..diffusion.sampling import PIXEL_CHANNELS, class_labels, to_uint8
from ..diffusion.sampling_config import SamplingConfig
from ..distributed.communicator import connect
from ..distributed.failures import AgreedError
from ..distributed.together import make_together, stop_signals
from ..errors import NumdiffError, UsageError, of_option, printable, visibly
from ..files import write_json
from ..option_names import as_options
from ..outputs import check_ending, check_outputs
from ..progress_bar import progress_bar
from ..settings import counted, flag
from ..sizes import image_shape
from .autoencoders import LatentDecoder, array_hash
from .checkpoint import buffer_names, newest_checkpoint
from .compiling import compile_for, plan_sampling
from .model_files import files_of, folder_of, is_foreign, load_model
from .options import resolve_device
from .picture_record import SHOWN_CLASSES, chunk_of, finished
from .report import columns_of, image_grid, save_png
from .run_folder import check_run, find_run, list_runs
from .sample_files import ANIMATIONS, Frames, read_mask, read_picture, samples_file

SHOWN = 256  # images on a grid, at most: few programs open a larger picture
ANIMATED = 64  # images of an animation, at most
COUNT = 16  # images, where neither a count nor pictures to invert are given
FRAMES = 40  # of an animation


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """The settings of `sample_command`, which describes them, but for those of the `Sampling`."""

    count: int | None = None
    steps: int | str | None = None
    sampler: str | None = None
    eta: float | None = None
    seed: int = 0
    class_name: Any = None
    batch: int = 16
    grid: str | os.PathLike | None = None
    npz: str | os.PathLike | None = None
    animation: str | os.PathLike | None = None
    frames: int | None = None
    inpaint: str | os.PathLike | None = None
    mask: str | os.PathLike | None = None
    init_image: str | os.PathLike | None = None
    invert: tuple = ()
    device: str = "auto"
    weights: str | None = None
    outdir: str = "runs"
    columns: int | None = None
    precision: str = "auto"
    guide_with: str | os.PathLike | None = None
    ema_std: float | None = None
    schedule: str | os.PathLike | None = None
    skip: int = 0
    vae: str | os.PathLike | None = None
    json_file: str | os.PathLike | None = None
    lora: str | os.PathLike | None = None


def sample_command(run, *, command=None, progress=False, echo=print, **given):
    """Make `count` images and write them; returns those that the grid shows, uint8 (count, H, W,
    C).

    run: run folder, its number in `outdir`, "auto" for the newest, a checkpoint, or a file or
        folder of weights that `numdiff convert` reads or writes without further options
    class_name: a class by name or index, or a list of them taken in turn; None takes all classes in
    turn
    skip: how many of the `count` images to leave out, the first ones, as an interrupted call has
    made them
    grid: picture of the first 256 images; None: samples.png, unless there is an npz or an animation
    npz: all images as an array, for evaluation; animation: the denoising, at `frames` (40) of its
        steps, .gif, .png, .apng
    count: None means 16, or as many as `invert` needs
    init_image: the picture of SDEdit, of which `strength` changes
    invert: pictures, each of which is encoded to its noise and made again; with slerp, a row of
    images from each to the next
    inpaint, mask: a picture and the part of it to generate, as `read_mask` takes it
    sampler, steps, cfg_scale, cfg_interval: as in the run's own pictures unless given
    (diffusion/pictures.py)
    guide_with: the model of autoguidance, as `run`; ema_std: the width of the model's average, as
    `numdiff.load` has it
    schedule: a file of `numdiff schedule`; lora: a file of adapters, for the weights of `run`
    vae: the autoencoder that decodes the latents of a model of latents; None: that of the run, if
    it has one
    json_file: a file for how the images were made, as the pictures have it, too
    columns: of the grid and the animation; progress: show a bar on a terminal
    command: the words of the command line, for that record (picture_record.py); RUN is the third
    of them. The other arguments are those of `numdiff.diffusion.Sampling` and `numdiff.load`.

    Under `mpiexec` the ranks make the batches in turn, and rank 0 writes. Ctrl-C and SIGTERM, on
    any rank, stop after the current evaluation: the files then hold the images made so far, and a
    `Stopped` says so.
    """
    own = {field.name for field in fields(SampleRequest)}
    request = SampleRequest(**{name: value for name, value in given.items() if name in own})
    more = {name: value for name, value in given.items() if name not in own}
    steps, sampler, seed = request.steps, request.sampler, request.seed
    count = request.count
    if count is None:
        count = images_of(len(request.invert), more.get("slerp")) if request.invert else COUNT
    grid, device, weights, columns = request.grid, request.device, request.weights, request.columns
    guide_with, schedule = request.guide_with, request.schedule
    device = resolve_device(device)
    communicator = connect("auto", device)
    with communicator.job():
        echo = visibly(echo if communicator.rank == 0 else _silent)
        grid = grid or (None if request.npz or request.animation else "samples.png")
        _check_names(grid, request.npz, request.animation, request.json_file)
        _check_inpainting(request.inpaint, request.mask, sampler)
        _check_init(request.init_image, more.get("strength"), request.inpaint, schedule)
        _check_invert(request, more.get("slerp"))
        more = {name: value for name, value in more.items() if value is not None}
        _check_alone(request.frames, request.animation, columns, grid, request.inpaint, more)
        communicator.check_options(
            {
                "RUN": str(run),
                "--class": request.class_name,
                **{
                    flag(name): value
                    for name, value in {
                        "count": count,
                        "steps": steps,
                        "sampler": sampler,
                        "eta": request.eta,
                        "seed": seed,
                        "batch": request.batch,
                        "grid": grid,
                        "skip": request.skip,
                        "npz": request.npz,
                        "animation": request.animation,
                        "inpaint": request.inpaint,
                        "mask": request.mask,
                        "init_image": request.init_image,
                        "invert": tuple(map(str, request.invert)),
                        "device": device,
                        "weights": weights,
                        "outdir": request.outdir,
                        "precision": request.precision,
                        "guide_with": guide_with and str(guide_with),
                        "schedule": schedule and str(schedule),
                        "lora": request.lora and str(request.lora),
                        "ema_std": request.ema_std,
                        **more,
                    }.items()
                },
            }
        )
        if request.animation and communicator.size > 1:
            raise UsageError(
                "--animation watches one process at work: leave mpiexec out, or --animation."
            )
        checkpoint = communicator.first(find_model, run, request.outdir, echo)
        guide = guide_with and communicator.first(
            of_option("--guide-with")(find_model), guide_with, request.outdir, echo
        )
        if guide and request.ema_std is None and os.path.samefile(guide, checkpoint):
            raise UsageError(
                f"--guide-with {guide_with} is the model itself, {checkpoint}: give a smaller one, or an "
                "earlier checkpoint, such as a run of fewer --steps."
            )
        outputs = [
            ("--grid", "the picture", grid),
            ("--npz", "the samples", request.npz),
            ("--animation", "the animation", request.animation),
            ("--json", "how they were made", request.json_file),
        ]
        read = [
            *files_of(checkpoint),
            *(files_of(guide) if guide else ()),
            request.inpaint,
            request.mask,
            request.init_image,
            *request.invert,
            schedule,
            request.vae,
            request.lora,
        ]
        communicator.first(check_outputs, outputs, *read)
        model = communicator.build(
            load_for_sampling,
            checkpoint,
            device,
            weights,
            request.precision,
            request.ema_std,
            echo,
            request.lora,
        )
        if guide:
            more["guide"] = communicator.build(
                load_for_sampling, guide, device, weights, request.precision, None, echo
            )
        if schedule:
            more["schedule"] = communicator.first(
                extensions.find("steps", "learned steps", "--schedule").read_schedule, schedule
            )
            own = len(more["schedule"]["sigmas"])
            for option, value in (
                ("--steps", None if steps == own else steps),
                ("--sampler", sampler),
            ):
                if value is not None:
                    raise UsageError(
                        f"{option} {value} does not go with --schedule {schedule}, which has steps of its "
                        "own: leave one of them out."
                    )
            steps = own
        if request.inpaint:
            if model.in_channels not in (1, 3):
                raise UsageError(
                    f"the model makes latents of {model.in_channels} channels, and --inpaint takes a "
                    "picture: leave it out, or give a model of pictures."
                )
            more.update(
                known=read_picture(request.inpaint, image_shape(model)),
                mask=read_mask(request.mask, model.image_size),
            )
            if communicator.rank == 0:
                _note_mask(request.inpaint, request.mask, more["mask"])
        decoder = communicator.build(find_decoder, request.vae, model, device)
        if request.init_image:
            more["init"] = read_init("--init-image", request.init_image, model, decoder)
        if request.invert:
            pictures = [read_init("--invert", path, model, decoder) for path in request.invert]
            more["invert"] = np.stack(pictures)
        communicator.check_options(
            {
                f"what is in {name}": read if isinstance(read, str) else array_hash(read)
                for name, read in (
                    (checkpoint, model_hash(model)),
                    (request.inpaint, more.get("known")),
                    (request.mask, more.get("mask")),
                    (request.init_image, more.get("init")),
                    ("--invert", more.get("invert")),
                    (guide, model_hash(more["guide"]) if guide else None),
                )
                # each rank has read it itself, maybe from its own disk
                if communicator.size > 1 and read is not None
            }
        )
        chosen, row = class_indices(request.class_name, model), more.get("slerp") or 1
        _check_skip(request.skip, count, row)
        if request.invert:
            more["invert"] = more["invert"][request.skip // row :]
        labels = class_labels(
            model,
            chosen if chosen is None else np.resize(np.repeat(chosen, row), count),
            count,
            row,
        )
        for line in say_classes(
            request.class_name, labels if labels is None else labels[request.skip :], model
        ):
            echo(line)
        labels, count, seed = (
            labels if labels is None else labels[request.skip :],
            count - request.skip,
            seed + request.skip // row,
        )
        replaced = in_place_of(model, sampler, steps, request.eta, more)
        sampler, steps = as_in_training(model, sampler, steps, request.eta, more)
        with as_options():
            config = SamplingConfig(
                count=count,
                steps=steps,
                sampler=sampler,
                eta=request.eta,
                seed=seed,
                y=labels,
                batch=request.batch,
                **more,
            )
            sampling = Sampling(model, config)
        compile_for(model, plan_sampling(model, config), communicator)
        if not (sampling.pixels or decoder) and (grid or request.animation):
            raise UsageError(
                f"the model makes latents of {model.in_channels} channels, which are no picture: give the "
                "--vae FILE that decodes them, or --npz FILE.npz alone."
            )
        made_of = decoder or sampling
        columns = columns or _columns(sampling, chosen)
        zoom = max(1, 128 // made_of.shape[0]) if made_of.shape[0] < 64 else 1

        shown = np.empty((min(count, SHOWN), *made_of.shape), made_of.dtype)
        moving = (
            Frames(
                min(count, ANIMATED), made_of.shape, sampling.evaluations, request.frames or FRAMES
            )
            if request.animation
            else None
        )
        made, started, first = 0, time.perf_counter(), communicator.rank == 0
        total = sampling.evaluations * -(-count // sampling.batch)
        total += sampling.inversion_evaluations * communicator.size
        with (
            stop_signals() as signals,
            samples_file(
                request.npz if first else None, (count, *made_of.shape), made_of.dtype
            ) as file,
            progress_bar(
                total, "sampling", "step", shown=None if progress and first else False
            ) as bar,
        ):
            for batches, number in _rounds(
                communicator, sampling, bar, moving, lambda: signals.number or 0, decoder
            ):
                for rows, images in batches:
                    shown[rows.start : rows.stop] = images[: max(len(shown) - rows.start, 0)]
                    made = rows.stop
                    if file:
                        file.write(images)
                if number:
                    break
            seconds = time.perf_counter() - started
            if first and (made or not number):
                record = finished(
                    describe(sampling, model, checkpoint, weights, guide),
                    sampling.labels,
                    made,
                    seconds,
                    decoder,
                    again(command, checkpoint, guide, request.skip + made if number else None),
                )
                if file:  # two commands that make the same images write the same bytes
                    same = {k: v for k, v in record.items() if k not in ("seconds", "command")}
                    file.finish(sampling.labels, same, made)
            if number and not made:
                was = "image was" if sampling.batch == 1 else f"{sampling.batch:,} images were"
                raise AgreedError(
                    f"stopped before the first {was} done; nothing was written.", 128 + number
                )
        if not first:
            if number:
                raise AgreedError("stopped.", 128 + number)
            return shown[:made]
        pictured = {name: value for name, value in record.items() if name != "classes"}
        if grid:
            save_png(grid, image_grid(shown[:made], columns, zoom=zoom), pictured)
        if moving:
            moving.save(
                request.animation, shown[: min(made, ANIMATED)], columns, zoom, chunk_of(pictured)
            )
        if request.json_file:
            write_json(request.json_file, pictured, "how they were made")
        for path, most in ((grid, SHOWN), (request.animation, ANIMATED)):
            if path and made > most:
                echo(f"{path} shows the first {most} of the {made:,} images")
        if request.invert and made:
            kept = request.invert[request.skip // row :]
            echo(say_inversion(kept, shown[:made], sampling.slerp))
        paths = [str(path) for path in (grid, request.npz, request.animation) if path]
        written = ", ".join(paths)
        if number:
            held = made if request.npz else min(made, SHOWN if grid else ANIMATED)
            done = request.skip + held - held % row
            names = "another file name" if len(paths) == 1 else "other file names"
            rest = (
                f"; the others are made by the same command with --skip {done}, and {names}"
                if done
                else ""
            )
            hold = "holds" if len(paths) == 1 else "hold"
            where = (
                f"which {written} {hold}"
                if held == made
                else f"of which {written} {hold} the first {held}"
            )
            raise AgreedError(
                f"stopped after {made:,} of {count:,} images, {where}{rest}.", 128 + number
            )
        echo(
            f"{written}: {counted(count, 'image')} of {checkpoint} (step {model.meta.get('step', 0):,}, "
            f"{weights_used(checkpoint, weights, model)} weights), {say_how(sampling, replaced)}, {model.precision}, "
            f"hash {record['model_hash']}, {seconds:.1f} s"
        )
        return shown


def say_inversion(paths, images, slerp):
    """A line on how well pictures came back from their noise. images: uint8 (n, H, W, C), the first
    of those that were made of the pictures in `paths`; slerp: length of a row, or None."""
    ends = [(i, i) for i in range(len(paths))]
    if slerp:
        rows = range(len(paths) - 1)
        ends = [(row + i, (row + i) * slerp - i) for row in rows for i in (0, 1)]
    errors = [
        np.abs(
            to_uint8(read_picture(paths[which], images.shape[1:])) - images[i].astype(float)
        ).mean()
        for which, i in ends
        if i < len(images)
    ]
    return f"inversion mean error {np.mean(errors):.2f} of 255 in the pictures that were made again"


def read_init(option, path, model, decoder):
    """The picture of an option as the model makes its own: float32 (H, W, C), or its latents."""
    if model.in_channels in PIXEL_CHANNELS:
        return read_picture(path, image_shape(model))
    if decoder is None:
        raise UsageError(
            f"the model makes latents of {model.in_channels} channels, and {option} takes a picture: "
            "give the --vae FILE that encodes it, too."
        )
    mean, _ = decoder.vae.encode(read_picture(path, decoder.shape)[None])
    return decoder.vae.scale(mean[0])


def find_decoder(vae, model, device):
    """The `LatentDecoder` of a model of latents: that of `vae`, else that of the run which made the
    model, if it is there; None for a model of pixels, and without an autoencoder."""
    if model.in_channels in PIXEL_CHANNELS:
        if vae:
            raise UsageError(
                f"--vae {vae} decodes latents, and this model makes pictures: leave it out."
            )
        return None
    own = (model.meta.get("pictures") or {}).get("vae")
    if vae is None and isinstance(own, str) and os.path.exists(own):
        vae = own
    return LatentDecoder(vae, image_shape(model), device, model.precision) if vae else None


def _silent(text):
    """What ranks above 0 print: nothing."""


def _rounds(communicator, sampling, bar, moving, asked, decoder=None):
    """Yields ([(rows, images)] in order, 0), one batch of each rank, on every rank. If `asked()`
    gives the number of a signal, the last item has that number and the batches that were done
    before it."""
    ranks, now = communicator.size, {}

    def progress():
        bar.update(ranks)
        now["look"]()

    def make(look):
        now["look"] = look
        rows, images = next(mine, (None, None))
        return rows, images if decoder is None or rows is None else decoder(images)

    mine = sampling.batches(progress, moving and _watch(moving, decoder), communicator.rank, ranks)
    for _ in range(0, sampling.count, ranks * sampling.batch):
        parts, number = make_together(communicator, make, asked)
        # after a gap there is no place in the file
        done = itertools.takewhile(lambda part: part is not None, parts)
        yield [part for part in done if part[0] is not None], number


def describe(sampling, model, checkpoint, weights, guide=None):
    """How the samples were made, for evaluating them later. guide: the file of the model of
    autoguidance."""
    from .. import __version__

    return {
        **sampling.options,
        **({"guide": str(guide)} if guide else {}),
        "precision": model.precision,
        "seeds": list(sampling.seeds),
        "weights": weights_used(checkpoint, weights, model),
        "model": str(checkpoint),
        "model_hash": model_hash(model),
        "training_steps": model.meta.get("step", 0),
        "diffusion": sampling.diffusion.options,
        "classes": model.meta.get("classes") or [],
        "numdiff": __version__,
    }


def model_hash(model):
    """A short hash of the weights that a model was loaded with."""
    if "hash" not in model.meta:
        model.meta["hash"] = array_hash(download(model.parameters.data))
    return model.meta["hash"]


def again(command, checkpoint, guide=None, count=None):
    """The words of a command line that repeats one, whatever `auto` or a run's number then mean.
    guide: the file of the model of autoguidance; count: of a command that was stopped."""
    if not command:
        return []
    words = [*command[:2], str(checkpoint), *command[3:]]
    if guide:
        words[words.index("--guide-with") + 1] = str(guide)
    return [*words, *([] if count is None else ["--count", str(count)])]


def say_how(sampling, replaced=None):
    """The sampler and its settings in words. replaced: (sampler, argument), as `in_place_of` gives
    them."""
    instead = f" (for {flag(replaced[1])}, in place of the run's {replaced[0]})" if replaced else ""
    respacing = f" ({sampling.respacing})" if sampling.respacing else ""
    words = [f"{sampling.sampler}{instead}", f"{counted(sampling.steps, 'step')}{respacing}"]
    words += [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in sampling.settings.items()
        if value != 0 and name != "weights"
    ]
    if sampling.strength is not None:
        words.append(f"strength {sampling.strength:g}")
    if sampling.cfg_scale is not None:
        where = f" on {sampling.cfg_channels} channels" if sampling.cfg_channels else ""
        words.append(f"guidance {sampling.cfg_scale:g}{where}")
    if sampling.guide is not None:
        words.append(f"autoguidance {sampling.guide_scale:g}")
    if sampling.cfg_interval is not None:
        words[-1] += " for sigma {:g} to {:g} ({} of {} evaluations)".format(
            *sampling.cfg_interval, sampling.guided_evaluations, sampling.evaluations
        )
    if sampling.invert is not None:
        return ", ".join([*words, f"{counted(len(sampling.invert), 'picture')} inverted"])
    first, last = sampling.seeds
    return ", ".join([*words, f"seed {first}" if first == last else f"seeds {first} to {last}"])


def say_classes(given, labels, model):
    """Yields lines that say which classes the images have, by name and index, and how `given` was
    read.

    labels: class indices of the images; None: the model has no classes
    """
    if labels is None:
        return
    names = model.meta.get("classes") or []
    for value in dict.fromkeys(map(str, listed(given))):
        index = _class_index(value, names, model.num_classes)
        if index < len(names) and normal(names[index]) != normal(value):
            yield f"note      --class {value} is no name of a class, and is read as an index: {names[index]!r}"
    counts = {int(index): 1 for index in labels}
    shown = [
        f"{names[index]!r} (index {index})" if index < len(names) else f"index {index}"
        for index in list(counts)[:SHOWN_CLASSES]
    ]
    more = f" … ({len(counts):,} classes)" if len(counts) > SHOWN_CLASSES else ""
    yield f"classes   {', '.join(shown)}{more}{', in turn' if len(counts) > 1 else ''}"


def weights_used(checkpoint, weights, model):
    """ "ema" or "raw", as the file has them; "ema-0.08" of an average put together afterwards;
    "converted" for another model file, which holds one set of weights."""
    if averaged := model.meta.get("averaged"):
        return f"ema-{averaged['std']:g}"
    names = {"parameters"} if is_foreign(checkpoint) else set(buffer_names(checkpoint))
    if names == {"parameters"}:
        return "converted"
    return weights or ("ema" if "ema" in names else "raw")


def find_model(run, outdir="runs", warn=print):
    """The checkpoint, model file or diffusers folder that RUN means; its errors tell a folder that
    is no run from a run without a checkpoint."""
    if str(run) == "auto":
        newest = next(
            filter(None, (newest_checkpoint(run_dir, warn) for run_dir in list_runs(outdir))), None
        )
        if newest is None:
            raise NumdiffError(
                f"there is no run with a checkpoint in {outdir}: train a model first, or give the right "
                "--outdir."
            )
        return newest
    path = find_run(run, outdir)
    if path.is_file() or folder_of(path):
        return path
    newest = newest_checkpoint(path, warn)
    if newest is None:
        check_run(path)
        raise NumdiffError(
            f"{run} has no valid checkpoint to sample from: continue training it, or give another run."
        )
    return newest


def load_by_options(*arguments, **more):
    """`load_model`, whose messages call its arguments as the command line does."""
    with as_options():
        return load_model(*arguments, **more)


def load_for_sampling(*arguments):
    """`load_by_options` of a model that holds no more than sampling needs."""
    return load_by_options(*arguments, inference=True)


def class_indices(y, model):
    """Indices of classes given by name, in upper or lower case, else by index; a `UsageError` lists
    the model's classes."""
    if y is None or (isinstance(y, (list, tuple)) and not y):
        return None
    if model.num_classes is None:
        raise UsageError("this model was trained without classes: leave --class out.")
    names = model.meta.get("classes") or []
    return [_class_index(value, names, model.num_classes) for value in listed(y)]


def listed(y):
    """The values of `class_name`, which may be one or several."""
    return [] if y is None else [y] if isinstance(y, (str, int, np.integer)) else y


def normal(name):
    """A name in the form in which names are compared: composed, in lower case."""
    return unicodedata.normalize("NFC", str(name)).casefold()


def _class_index(value, names, count):
    """The index of the class of exactly this name, else of this name in another case, else the
    index itself."""
    for same in (str, lambda name: unicodedata.normalize("NFC", str(name)), normal):
        found = [k for k, name in enumerate(names) if same(name) == same(value)]
        if len(found) > 1:
            which = " or ".join(f"{names[k]!r} (index {k})" for k in found[:4])
            how = "its index" if len({names[k] for k in found}) == 1 else "its exact name"
            raise UsageError(f"--class {printable(value, 60)} may be {which}: give {how}.")
        if found:
            return found[0]
    if str(value).isdecimal() and len(str(value)) < 19 and int(value) < count:
        return int(value)
    listed = (
        ", ".join(map(repr, names[:12])) + (" …" if len(names) > 12 else "") + " or "
        if names
        else ""
    )
    raise UsageError(
        f"the model has no class {str(value)[:60]!r}: use {listed}an index from 0 to {count - 1}."
    )


def _columns(sampling, labels):
    """Columns of the grid: the images of a row of slerp, or one for each class where classes take
    turns; else None, a square."""
    if sampling.slerp:
        return sampling.slerp
    return columns_of(sampling.model) if labels is None else None


def _watch(frames, decoder=None):
    return lambda rows, k, x_t: frames.watch(rows, k, lambda: (decoder or to_uint8)(download(x_t)))


def _check_names(grid, npz, animation, json_file):
    for option, path, endings in (
        ("--json", json_file, (".json",)),
        ("--grid", grid, (".png",)),
        ("--npz", npz, (".npz",)),
        ("--animation", animation, ANIMATIONS),
    ):
        check_ending(option, path, *endings)


def _check_skip(skip, count, row):
    """row: images of a row of slerp, else 1."""
    if row > count:
        raise UsageError(
            f"--slerp {row} makes rows of more than the {counted(count, 'image')} of --count: give a "
            "smaller one."
        )
    if not 0 <= skip < count:
        raise UsageError(
            f"--skip {skip} leaves none of the {counted(count, 'image')} of --count: give a smaller one."
            if skip > 0
            else f"--skip {skip} must be at least 0."
        )
    if skip % row:
        raise UsageError(
            f"--skip {skip} must leave whole rows of --slerp {row}: give {skip - skip % row}."
        )


def _check_alone(frames, animation, columns, grid, inpaint, more):
    """Raise a `UsageError` for an option of something that is not made, which would be ignored."""
    for option, value, needs, there in (
        ("--frames", frames, "--animation", animation),
        ("--columns", columns, "--grid or --animation", grid or animation),
        ("--jump", more.get("jump"), "--inpaint", inpaint),
        ("--resamples", more.get("resamples"), "--inpaint", inpaint),
    ):
        if value is not None and not there:
            raise UsageError(f"{option} {value} needs {needs}: add it, or leave this out.")


def _check_inpainting(inpaint, mask, sampler):
    if bool(inpaint) != bool(mask):
        raise UsageError(
            "--inpaint PICTURE and --mask MASK belong together: give both, or neither."
        )
    if inpaint and sampler:
        raise UsageError("--inpaint has a sampler of its own, RePaint: leave --sampler out.")


def _check_init(init_image, strength, inpaint, schedule):
    if strength is not None and not init_image:
        raise UsageError(f"--strength {strength:g} needs --init-image: add it, or leave this out.")
    for option, value in (("--inpaint", inpaint), ("--schedule", schedule)):
        if init_image and value:
            raise UsageError(
                f"--init-image and {option} exclude each other: leave one of them out."
            )


def _check_invert(request, slerp):
    for option in ("init_image", "inpaint", "schedule"):
        if request.invert and getattr(request, option):
            raise UsageError(
                f"--invert and {flag(option)} exclude each other: leave one of them out."
            )
    if slerp and len(request.invert) == 1:
        raise UsageError(
            "--slerp goes from one picture of --invert to the next: give --invert once more."
        )


def _note_mask(inpaint, mask, kept):
    """Say on stderr that a mask leaves nothing to repaint, or nothing to keep. kept: what
    `read_mask` returns."""
    if kept.all() or not kept.any():
        colour, effect = (
            ("black", "nothing is repainted") if kept.all() else ("white", "nothing is kept")
        )
        note = f"note: --mask {mask} is {colour} everywhere, so {effect} of {inpaint}."
        print(printable(note), file=sys.stderr, flush=True)
