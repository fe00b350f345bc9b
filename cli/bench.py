"""`numdiff bench`: how fast this machine trains and samples, and how fast each kernel is."""
import math

import click

from numdiff.settings import SAMPLERS
from numdiff.training import kinds

from .settings import GroupedCommand, KindGroup, ListOf, Setting, kind_command, settings
from .suggest import Group

SHARED = ("preset", "device", "precision", "eager", "recompute", "batch", "microbatch", "image_size", "channels")
SAMPLED = ("preset", "device", "precision", "eager", "image_size", "channels")
KERNELS = ("device", "precision", "batch", "image_size", "channels")
MEASURED = tuple(name for kind in kinds.KINDS.values() for name in kind.measured)


@click.group(cls=Group)
def bench():
    """Measure how long a training step, sampling and their kernels take."""


def measured_by(*options):
    """Options under the heading Measurement; each is (flag, attributes)."""
    return [click.option(name, cls=Setting, heading="Measurement", **attributes) for name, attributes in options]


def measurement(*options):
    """Decorator: such options."""
    def decorate(function):
        for option in reversed(measured_by(*options)):
            function = option(function)
        return function
    return decorate


VERSUS = (
    ("--versus", {"type": click.Choice(["torch"]), "help": "Also measure PyTorch with the same model, in turns with "
                  "numdiff."}),
    ("--modes", {"metavar": "MODE,…", "type": ListOf(str), "help": "PyTorch's modes: eager, compile, graphs (compiled, "
                 "with CUDA graphs), or all. Compiling takes about a minute.  [default: eager,graphs; on the CPU "
                 "eager,compile]"}),
    ("--torch-precision", {"metavar": "NAME,…", "type": ListOf(str), "help": "PyTorch's arithmetic: fp32 (strict), "
                           "tf32, bf16, fp16, or all.  [default: the counterpart of --precision; bf16 for fp16]"}))


STEP = measured_by(
    ("--steps", {"metavar": "STEPS", "type": click.IntRange(1), "default": 20, "show_default": True,
                 "help": "Steps to measure; their median is reported."}),
    ("--warmup", {"metavar": "STEPS", "type": click.IntRange(0), "default": 5, "show_default": True,
                  "help": "Steps to run before, not measured."}), *VERSUS)
SAMPLE = measured_by(
    ("--sampler", {"type": click.Choice(SAMPLERS), "metavar": "NAME", "default": "ddim", "show_default": True,
                   "help": f"How samples are made: {', '.join(SAMPLERS)}."}),
    ("--sample-steps", {"metavar": "STEPS", "type": click.IntRange(1), "default": 50, "show_default": True,
                        "help": "Steps of the sampler; each evaluates the model once (heun: twice)."}),
    ("--batch", {"metavar": "IMAGES", "type": click.IntRange(1), "default": 32, "show_default": True,
                 "help": "Images at a time."}),
    ("--cfg-scale", {"metavar": "SCALE", "type": float, "help": "Classifier-free guidance; each evaluation then takes "
                     "both halves in one batch of twice the images.  [default: none]"}),
    ("--batches", {"metavar": "N", "type": click.IntRange(1), "default": 5, "show_default": True,
                   "help": "Batches to measure; their median is reported."}),
    ("--warmup", {"metavar": "N", "type": click.IntRange(0), "default": 1, "show_default": True,
                  "help": "Batches to run before, in addition to the first two; not measured."}), *VERSUS)


def step_command(kind):
    return kind_command(kind, "bench step", *SHARED, *kind.measured, options=STEP, run=measure)


def sample_command(kind):
    return kind_command(kind, "bench sample", *SAMPLED, *kind.sampled, options=SAMPLE, run=measure_samples)


@bench.group(cls=KindGroup, make=step_command)
def step():
    """Measure a whole training step of a model: noise, forward, backward, update."""


@bench.group(cls=KindGroup, make=sample_command)
def sample():
    """Measure sampling from a model: the evaluations of `numdiff sample`, with random weights."""


def model_name(options):
    return kinds.get(options.model).label(options)


def echo_model(options):
    what = model_name(options)
    size = f"{options.image_size}×{options.image_size}" + (f"×{options.channels}" if options.channels else "")
    click.echo(f"model        {what}, {size}, batch {options.batch}, {options.precision}")


def measure(model, steps, warmup, versus, modes, torch_precision, **given):
    from numdiff.benchmark.step import bench_step
    from numdiff.training.options import resolve

    options = resolve({"model": model, **given})
    pairs = torch_pairs(options, versus, modes, torch_precision)
    echo_model(options)
    result = bench_step(options, steps, warmup, pairs, lambda what: click.echo(f"measuring    {what} …", err=True))
    click.echo(f"device       {result['device']}")
    click.echo(f"parameters   {result['parameters']:,}")
    click.echo(f"arithmetic   {result['flops_per_step'] / 1e12:.4g} TFLOP a step")
    click.echo(f"first step   {result['first_step_s']:.1f} s, with loading or compiling the kernels")
    click.echo(f"step         {result['ms']:.2f} ms, median of {steps * max(1, measured(result))} (from "
               f"{result['ms_fastest']:.2f} to {result['ms_slowest']:.2f})")
    share = "" if result["mfu"] is None else f", {100 * result['mfu']:.1f} % of the card's peak"
    click.echo(f"speed        {result['images_per_second']:,.1f} images/s, {result['tflops']:.3g} TFLOP/s{share}")
    click.echo(f"peak memory  {result['peak_mib']:,.0f} MiB ({result['peak_of']})")
    if result["memory"]:
        from numdiff.benchmark.memory import in_short
        click.echo(f"held         {in_short(result['memory'])}")
    if pairs:
        click.echo("\n".join(["", *comparison(result, options.precision)]))


def measure_samples(model, sampler, sample_steps, cfg_scale, batches, warmup, versus, modes, torch_precision, **given):
    from numdiff.benchmark.sample import bench_sample
    from numdiff.training.options import resolve

    options = resolve({"model": model, **given})
    pairs = torch_pairs(options, versus, modes, torch_precision)
    echo_model(options)
    result = bench_sample(options, batches, warmup, pairs, lambda what: click.echo(f"measuring    {what} …", err=True),
                          sampler=sampler, steps=sample_steps, cfg_scale=cfg_scale)
    guided = f" of {result['images_asked']} images (guidance {cfg_scale:g})" if result["images_asked"] > options.batch \
        else ""
    click.echo(f"device       {result['device']}")
    click.echo(f"parameters   {result['parameters']:,}")
    click.echo(f"sampler      {sampler}, {sample_steps} steps: {result['evaluations']} evaluations{guided} a batch, "
               f"each {result['flops_per_evaluation'] / 1e12:.4g} TFLOP")
    click.echo(f"first batch  {result['first_batch_s']:.1f} s, with building the model and loading or compiling the "
               f"kernels; the second {result['second_batch_s']:.2f} s")
    click.echo(f"batch        {result['ms']:,.1f} ms, median of {batches * max(1, measured(result))} (from "
               f"{result['ms_fastest']:,.1f} to {result['ms_slowest']:,.1f})")
    click.echo(f"evaluation   {result['ms_per_evaluation']:.3f} ms")
    share = "" if result["mfu"] is None else f", {100 * result['mfu']:.1f} % of the card's peak"
    click.echo(f"speed        {result['images_per_second']:,.4g} images/s, {result['tflops']:.3g} TFLOP/s{share}")
    click.echo(f"peak memory  {result['peak_mib']:,.0f} MiB ({result['peak_of']})")
    if pairs:
        click.echo("\n".join(["", *sample_comparison(result, options.precision)]))


def sample_comparison(result, precision):
    """Lines of the table that compares the sampling of both programs."""
    yield f"{'':24s} images/s  ms a batch  ms an evaluation  first s  peak MiB  numdiff takes"
    for name, row in (("numdiff " + precision, {**result, "first_s": result["first_batch_s"]}),
                      *((f"PyTorch {r['mode']} {r['precision']}", r) for r in result["versus"])):
        if "fault" in row:
            yield f"{name:24s} failed: {row['fault']}"
            continue
        ratio = f"{1 / row['ratio']:.2f} of its time" if "ratio" in row else ""
        peak = f"{row['peak_mib']:9,.0f}" if row["peak_mib"] else f"{'–':>9}"
        yield (f"{name:24s} {row['images_per_second']:8,.1f} {row['ms']:11,.1f} {row['ms_per_evaluation']:17,.3f} "
               f"{row['first_s']:8.1f} {peak}  {ratio}").rstrip()


def measured(result):
    return sum("ms" in row for row in result["versus"])


def torch_pairs(options, versus, modes, torch_precision):
    """The (mode, precision) pairs of PyTorch to measure; a `UsageError` for one that does not exist."""
    from numdiff.benchmark.step import BEST_MODES, COMPARED
    from numdiff.benchmark.torch_step import MODES, PRECISIONS, require_torch, require_twin
    from numdiff.errors import UsageError
    if not versus:
        if modes or torch_precision:
            raise UsageError(f"{'--modes' if modes else '--torch-precision'} needs --versus torch; add it, or leave it "
                             "out.")
        return []
    for option, names, known in (("--modes", modes, MODES), ("--torch-precision", torch_precision, PRECISIONS)):
        for name in names or ():
            if name not in known and names != ("all",):
                raise UsageError(f"{option} {name} does not exist; use some of {', '.join(known)}, or all.")
    require_twin(options)
    require_torch()
    device = "cuda" if options.device == "cuda" else "cpu"
    if modes == ("all",):
        modes = [mode for mode in MODES if device == "cuda" or mode != "graphs"]
    if torch_precision == ("all",):
        torch_precision = PRECISIONS
    modes = modes or BEST_MODES[device]
    precisions = torch_precision or (COMPARED[options.precision] if device == "cuda" else ("fp32",))
    return [(mode, precision) for precision in precisions for mode in modes]


def comparison(result, precision):
    """Lines of the table that compares the steps."""
    yield f"{'':24s}        ms  TFLOP/s    MFU  peak MiB  against numdiff"
    for name, row in (("numdiff " + precision, result),
                      *((f"PyTorch {r['mode']} {r['precision']}", r) for r in result["versus"])):
        if "fault" in row:
            yield f"{name:24s} failed: {row['fault']}"
            continue
        mfu = f"{100 * row['mfu']:5.1f} %" if row["mfu"] else f"{'–':>7}"
        ratio = f"{row['ratio']:.2f} times as long" if "ratio" in row else ""
        peak = f"{row['peak_mib']:9,.0f}" if row["peak_mib"] else f"{'–':>9}"
        yield f"{name:24s} {row['ms']:9.2f} {row['tflops']:8.3g} {mfu} {peak}  {ratio}"
    yield "PyTorch's step leaves out noise, clipping and the average of the weights, which numdiff's includes."


@bench.command(cls=GroupedCommand)
@click.argument("operations", metavar="[OPERATION]…", nargs=-1)
@measurement(
    ("--of", {"type": click.Choice([*kinds.names(), "files"]), "default": kinds.names()[0], "show_default": True,
              "help": "Whose shapes: those of a training step of this model; files: a problem or two for each file of "
                      "numdiff/kernels, as its docstring tells them under MEASURED."}),
    ("--chosen", {"is_flag": True, "help": "Only the version that the launcher chooses, instead of each."}),
    ("--shapes", {"metavar": "N", "type": click.IntRange(1), "help": "How many shapes of each operation to measure, "
                  "the largest first.  [default: 3; all if operations are named]"}),
    ("--versus", {"type": click.Choice(["torch"]), "help": "Also measure cuBLAS and cuDNN, through PyTorch.  [default: "
                  "if it is installed]"}),
    ("--json", {"metavar": "FILE.json", "type": click.Path(dir_okay=False), "help": "Write the rows, after each "
                "problem; with --of files it is what `python -m tests.kernels.write_figures` reads."}),
    ("--png", {"metavar": "FILE.png", "type": click.Path(dir_okay=False), "help": "Draw the rows that compute under "
               "the roof of the card: TFLOP/s over FLOPs a byte."}))
@settings(*KERNELS, *MEASURED)
def kernels(operations, of, chosen, shapes, versus, json, png, **given):
    """Measure each version of the operations (default: all) at the shapes of a model.

    A star marks the version that the launcher chooses. Rates count the bytes and FLOPs that the operation needs at
    least. The roof is the measured speed of the memory or the peak of the arithmetic, whichever limits the operation.
    """
    from numdiff.benchmark.kernels import bench_kernels, results_of
    from numdiff.files import check_output, write_json
    from numdiff.training.options import resolve

    check_picture(png)
    if json:
        check_output("the rows", json)
    if of == "files":
        measured = files_rows(operations, chosen, shapes, versus, given)
        title = "Kernels, a problem or two for each file"
    else:
        options = resolve({"model": of, **given})
        echo_model(options)
        measured = bench_kernels(options, operations, chosen, shapes, versus == "torch")
        title = f"Kernels of a step: {model_name(options)}, {options.precision}"
    last, rows = None, []
    for row in measured:
        rows.append(row)
        if json:
            write_json(json, results_of(rows), "the rows")
        if row["operation"] != last:
            last = row["operation"]
            click.echo(f"\n{last:63} {'calls':>5} {'µs':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of roof':>10} "
                       f"{'PyTorch µs':>10}")
        roof = "–" if row["roof"] is None else f"{100 * row['roof']:.0f} % {row['bound'][:3]}"
        theirs = "–" if row["torch_us"] is None else f"{row['torch_us']:.1f}"
        speed = f"{row['tflops']:8.2f}" if row["tflops"] else f"{'–':>8}"
        click.echo(f"  {row['shape']:40} {row['version']:3} {row['name'] or '':16} {row['calls']:>5} {row['us']:9.1f} "
                   f"{row['gb_s']:7,.1f} {speed} {roof:>10} {theirs:>10}")
    if json:
        click.echo(f"\nrows         {json}, {len(rows)}")
    if png:
        from numdiff.benchmark.rooflines import draw_kernels
        count = draw_kernels(png, rows, title)
        click.echo(f"\nroofline     {png}, {count} of {len(rows)} rows")


def files_rows(operations, chosen, shapes, versus, given):
    """The rows of `--of files`; its problems stand in a file, so most options have nothing to say."""
    from numdiff.benchmark.problems import bench_files
    from numdiff.benchmark.torch_step import require_torch
    from numdiff.device import get_backend
    from numdiff.errors import NumdiffError, UsageError
    from numdiff.training.options import resolve

    for name, value in {"chosen": chosen or None, "shapes": shapes, **given}.items():
        if value is not None and name != "device":
            raise UsageError(f"--of files has problems of its own: leave out --{name.replace('_', '-')}.")
    if resolve({"device": given.get("device")}).device != "cuda":
        raise NumdiffError("the problems of --of files are measured on a GPU, and --device is not cuda; run it on the "
                           "card.")
    if versus:
        require_torch()
    return bench_files(get_backend("cuda"), operations, click.echo)


def check_picture(path):
    """Refuse a picture that could not be written before the long work that it shows begins."""
    if path:
        from numdiff.files import check_output
        from numdiff.plots import check_ending
        check_output("the picture", check_ending(path))


@bench.command(cls=GroupedCommand)
@measurement(
    ("--of", {"type": click.Choice(kinds.names()), "default": kinds.names()[0], "show_default": True,
              "help": "The model whose training step gives the shapes."}),
    ("--shapes", {"metavar": "N", "type": click.IntRange(1),
                  "help": "How many shapes of each kind to measure, those with most arithmetic first.  [default: "
                          "all]"}),
    ("--timeout", {"metavar": "SECONDS", "type": click.FloatRange(0), "default": math.inf,
                   "help": "Time after which no further shape is begun; the largest come first.  [default: none]"}),
    ("--out", {"metavar": "FILE.json", "type": click.Path(dir_okay=False),
               "help": "The table to write; an existing one keeps its entries for other shapes.  [default: this "
                       "card's, in numdiff/kernels/tuning]"}))
@settings(*KERNELS, *MEASURED)
def tune(of, shapes, timeout, out, **given):
    """Measure which tiles are best for the float16 kernels on this card, and write its table.

    Launchers choose tiles by an estimate. The table lists the shapes for which another choice is faster. It is written
    after each shape, so an interruption loses nothing.
    """
    from numdiff.benchmark.tune import tune as measure_tiles
    from numdiff.training.options import resolve

    options = resolve({"model": of, **given})
    echo_model(options)
    path, found = measure_tiles(options, out, click.echo, shapes, timeout)
    better = sum(choice is not None for rows in found.values() for choice in rows.values())
    click.echo(f"{better} of {sum(map(len, found.values()))} shapes have a faster choice; written to {path}")
