"""`numdiff bench`: how fast this machine trains and samples, and how fast each kernel is."""
import math
import os

import click

from numdiff.settings import SAMPLERS
from numdiff.training import kinds
from numdiff.training.options import settings_of

from .output import echo
from .settings import GroupedCommand, KindGroup, ListOf, Setting, classes_by_number, kind_command, settings
from .suggest import Group

SHARED = ("preset", "device", "precision", "eager", "recompute", "batch", "microbatch", "optimizer", "image_size",
          "channels")
LADDER_SETTINGS = ("preset", "device", "recompute", "batch", "image_size", "channels", "data")
SAMPLED = ("preset", "device", "precision", "eager", "image_size", "channels")
OF_RUNS = ("checkpoint_every", "keep", "ema_std", "ema_snapshots", "sample_every", "sample_count", "log_every")
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


LADDER = measured_by(
    ("--rows", {"metavar": "N,…", "type": ListOf(int), "help": "Only these rows of the ladder.  [default: all]"}),
    ("--steps", {"metavar": "STEPS", "type": click.IntRange(1), "default": 20, "show_default": True,
                 "help": "Steps to measure a row, fewer where they take more than a few seconds; their median is "
                         "reported."}),
    ("--warmup", {"metavar": "STEPS", "type": click.IntRange(1), "default": 3, "show_default": True,
                  "help": "Steps to run before, not measured."}),
    ("--csv", {"metavar": "FILE.csv", "type": click.Path(dir_okay=False), "help": "Write the rows, after each row."}),
    ("--png", {"metavar": "FILE.png", "type": click.Path(dir_okay=False), "help": "Draw images/s as bars, and a point "
               "a row under the roof of the card."}),
    ("--versus", {"type": click.Choice(["torch"]), "help": "Also climb PyTorch's ladder: eager, the largest batch, "
                  "torch.compile, fused attention, autocast."}))


QUALITY = measured_by(
    ("--target", {"metavar": "DISTANCE,…", "type": ListOf(float), "help": "Spatial Fréchet distances to reach; the run "
                  "ends with the smallest.  [default: 0.3,0.15,0.08]"}),
    ("--every", {"metavar": "STEPS", "type": click.IntRange(1), "help": "Steps between two measurements.  [default: a "
                 "sixteenth of --steps]"}),
    ("--samples", {"metavar": "IMAGES", "type": click.IntRange(4, 1_000_000), "help": "Images of a measurement.  "
                   "[default: as many as the data has]"}),
    ("--sample-batch", {"metavar": "IMAGES", "type": click.IntRange(1), "default": 128, "show_default": True,
                        "help": "How many of them are made at a time."}),
    ("--json", {"metavar": "FILE.json", "type": click.Path(dir_okay=False), "help": "Write what was measured, after "
                "each measurement."}),
    ("--png", {"metavar": "FILE.png", "type": click.Path(dir_okay=False), "help": "Draw the distances over the seconds "
               "of training."}),
    ("--grid", {"metavar": "FILE.png", "type": click.Path(dir_okay=False), "help": "Write the first samples of each "
                "measurement, a column for each class, over those of the measurement before."}))


def step_command(kind):
    return kind_command(kind, "bench step", *SHARED, *kind.measured, options=STEP, run=measure)


def ladder_command(kind):
    return kind_command(kind, "bench ladder", *LADDER_SETTINGS, *kind.measured, options=LADDER, run=measure_ladder)


def sample_command(kind):
    return kind_command(kind, "bench sample", *SAMPLED, *kind.sampled, options=SAMPLE, run=measure_samples)


def quality_command(kind):
    names = [name for name in settings_of(kind.name) if name not in OF_RUNS]
    return kind_command(kind, "bench quality", *names, options=QUALITY, run=measure_quality)


@bench.group(cls=KindGroup, make=step_command)
def step():
    """Measure a whole training step of a model: noise, forward, backward, update."""


@bench.group(cls=KindGroup, make=ladder_command)
def ladder():
    """Measure a training step with one technique more a row: from naive float32 kernels to float16 in a graph."""


@bench.group(cls=KindGroup, make=sample_command)
def sample():
    """Measure sampling from a model: the evaluations of `numdiff sample`, with random weights."""


@bench.group(cls=KindGroup, make=quality_command)
def quality():
    """Train, and measure how many seconds it takes to a quality: LEADERBOARD.md has the rules."""


def measure_quality(model, target, every, samples, sample_batch, json, png, grid, **given):
    import sys

    from numdiff.data.dataset import default_path
    from numdiff.distributed.communicator import current
    from numdiff.evaluation.quality import (
        SAMPLE_STEPS,
        SAMPLER,
        TARGETS,
        bench_quality,
        check_targets,
        command_of,
        conclusion,
        draw,
        leaderboard_row,
        revision,
        rules_broken,
    )
    from numdiff.files import check_output, write_json
    from numdiff.training.options import resolve
    from numdiff.training.report import save_png

    given = {name: value for name, value in classes_by_number(model, given).items() if value is not None}
    given.setdefault("data", default_path())  # named: all its classes, of which the presets choose a few
    targets = check_targets(TARGETS if target is None else target)
    check_picture(png)
    check_picture(grid)
    if json:
        check_output("what was measured", json)
    check_apart(("--png", png), ("--grid", grid), ("--json", json))
    options = resolve({"model": model, **given})
    echo(f"model        {model_name(options)}, {options.image_size}×{options.image_size}, batch {options.batch}, "
         f"{options.precision}, {options.steps:,} steps")
    sampling = given.get("sampler", SAMPLER), given.get("sample_steps", SAMPLE_STEPS)
    broken = rules_broken(options, samples, *sampling, given.get("cfg_scale"))
    no_row = f"row          none of LEADERBOARD.md, for {', '.join(broken)}"
    if broken:
        echo(no_row)
    record = bench_quality(
        options, targets, every, samples, *sampling, sample_batch, given.get("cfg_scale"), echo,
        lambda so_far: write_json(json, so_far, "what was measured") if json else None,
        lambda picture: save_png(grid, picture) if grid else None)
    for text in conclusion(record):
        echo(text)
    if png:
        if current().rank == 0:
            draw(png, record, f"{model_name(options)}, {record['card']}")
        echo(f"curve        {png}")
    if grid:
        echo(f"samples      {grid}")
    if not broken and any("seconds" in row for row in record["targets"]):
        echo(f"row          {leaderboard_row(record, revision(), command_of(sys.argv[1:]))}")
    else:
        echo(no_row if broken else "row          none of LEADERBOARD.md: no target was reached")


def model_name(options):
    return kinds.get(options.model).label(options)


def echo_model(options):
    what = model_name(options)
    size = f"{options.image_size}×{options.image_size}" + (f"×{options.channels}" if options.channels else "")
    click.echo(f"model        {what}, {size}, batch {options.batch}, {options.precision}")


def measure(model, steps, warmup, versus, modes, torch_precision, **given):
    from numdiff.benchmark.step import bench_step
    from numdiff.training.options import resolve

    if versus and given.get("optimizer") is None:
        given["optimizer"] = "adamw"  # PyTorch's, whatever the preset has
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
    if result["recompute"]:
        click.echo("\n".join(f"recompute    {line}" for line in price(result, result["recompute"])))
    if pairs:
        click.echo("\n".join(["", *comparison(result, options.precision)]))


def price(result, found):
    """The lines on what `--recompute` costs and saves."""
    yield found["foreseen"]
    if "fault" in found:
        yield f"without it: {found['fault']}"
        return
    ms, mib = found["ms"], found["mib"]
    yield (f"without it {ms:.2f} ms{f', {mib:,.0f} MiB' if mib else ''}: it costs {result['ms'] - ms:.2f} ms, "
           f"{100 * (result['ms'] / ms - 1):.0f} %"
           + (f", and saves {mib - result['memory'][0] / 2**20:,.0f} MiB" if mib else ""))


def measure_ladder(model, rows, steps, warmup, csv, png, versus, **given):
    from numdiff.benchmark import ladder as measuring
    from numdiff.files import check_output, write_text
    from numdiff.training.options import resolve

    options = resolve({"model": model, "optimizer": "adamw", **given})  # PyTorch's, whatever the preset has
    measuring.check_rows(options, rows)
    check_picture(png)
    if csv:
        check_output("the rows", csv)
    check_apart(("--csv", csv), ("--png", png))
    if versus:
        from numdiff.benchmark.torch_step import require_torch, require_twin
        require_twin(options)
        require_torch()
    size = f"{options.image_size}×{options.image_size}"
    echo(f"model        {model_name(options)}, {size}, batch {options.batch}")
    click.echo(f"\n{'':35} {'batch':>6} {'ms':>9} {'images/s':>9} {'TFLOP/s':>8} {'speed-up':>9} {'MFU':>7} "
               f"{'peak MiB':>9} {'losses':>8}")
    done = []
    for row in measuring.bench_ladder(options, rows, steps, warmup,
                                      lambda what: echo(f"measuring    {what} …", err=True)):
        done.append(row)
        echo(ladder_line(row))
        if csv:
            write_text(csv, measuring.as_csv(done), "the rows")
    click.echo("\n".join(ladder_end(done, measuring)))
    if png:
        from numdiff.benchmark.rooflines import draw_ladder
        draw_ladder(png, done, f"A training step: {model_name(options)}, {size}")
        echo(f"picture      {png}")
    if csv:
        echo(f"rows         {csv}")
    if versus:
        from numdiff.benchmark.torch_ladder import bench_torch_ladder
        from numdiff.device import get_backend
        flops = next((row["flops"] / row["batch"] for row in done if "ms" in row), 0)
        click.echo("\nPyTorch's step, without noise, clipping and the average of the weights; speed-up over its own "
                   "first row")
        for row in bench_torch_ladder(options, get_backend(options.device), flops, steps, warmup,
                                      lambda what: echo(f"measuring    {what} …", err=True)):
            echo(ladder_line(row))


def ladder_line(row):
    """A row of the ladder in one line."""
    name = f"{row.get('number', ''):2}  {row['name']}"
    if "ms" not in row:
        return f"{name:35} " + (f"left out: {row['left_out']}" if row.get("left_out") else f"failed: {row['fault']}")
    mfu = "–" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    peak = "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
    losses = "–" if row["deviation"] is None else f"{row['deviation']:.1e}"
    return (f"{name:35} {row['batch']:6,} {row['ms']:9,.2f} {row['images_per_second']:9,.1f} {row['tflops']:8.3g} "
            f"{row['speedup']:7.2f} × {mfu:>7} {peak:>9} {losses:>8}")


def ladder_end(rows, measuring):
    """Lines below the ladder: times by component, and what the losses differ by."""
    timed = [row for row in rows if "ms" in row]
    if not timed:
        return
    yield "\nms of a step launched kernel by kernel; idle: what the step takes beyond its kernels"
    yield f"{'':35} " + " ".join(f"{part:>11}" for part in (*measuring.COMPONENTS, "idle"))
    for row in timed:
        parts = [*row["components"].values(), row["idle_ms"]]
        yield f"{row['number']:2}  {row['name']:31} " + " ".join(f"{ms:11,.3f}" for ms in parts)
    yield ""
    for precision, (most, least, longest, bar) in measuring.worst(timed).items():
        verdict = "as expected" if most <= bar else "MORE than expected"
        count = longest if least == longest else f"{least} to {longest}"
        yield (f"losses       {precision}: the first {count} differ from the first row's by at most {most:.1e} of "
               f"their value, {verdict} (up to {bar:g})")


def measure_samples(model, sampler, sample_steps, cfg_scale, batches, warmup, versus, modes, torch_precision, **given):
    from numdiff.benchmark.sample import bench_sample
    from numdiff.training.options import resolve

    options = resolve({"model": model, "optimizer": "adamw", **given})  # no step is taken
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
    if options.optimizer != "adamw":
        raise UsageError(f"--optimizer {options.optimizer} has no counterpart in --versus torch, whose step is "
                         "AdamW's: leave one of them out.")
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
@measurement(
    ("--batch", {"metavar": "IMAGES", "type": click.IntRange(1, 1 << 12), "default": 1, "show_default": True,
                 "help": "Images."}),
    ("--size", {"metavar": "PX", "type": click.IntRange(1, 1 << 10), "default": 32, "show_default": True,
                "help": "Side of an image."}),
    ("--channels", {"metavar": "N", "type": click.IntRange(1, 1 << 12), "default": 64, "show_default": True,
                    "help": "Channels, in and out."}),
    ("--repeats", {"metavar": "N", "type": click.IntRange(1), "default": 50, "show_default": True,
                   "help": "Runs; their median is reported."}))
@settings("device", "precision")
def transfer(batch, size, channels, repeats, **given):
    """Measure a 3×3 convolution with its copies to and from the device, and on arrays that stay there."""
    from numdiff.benchmark.transfer import bench_transfer
    from numdiff.device import get_backend
    from numdiff.training.options import resolve

    options = resolve(given)
    if options.precision not in ("fp32", "fp16"):
        from numdiff.errors import UsageError
        raise UsageError(f"--precision {options.precision}: copies are measured in fp32 or fp16.")
    found = bench_transfer(get_backend(options.device), batch, size, channels, half=options.precision == "fp16",
                           repeats=repeats)
    total = found["upload"] + found["kernel"] + found["download"]
    echo(f"convolution  {batch}×{size}×{size}×{channels}, 3×3, to {channels} channels, {options.precision}; "
         f"{found['flops'] / 1e9:.3g} GFLOP")
    click.echo("\n|                                  |        ms | of the three |  GB/s |")
    echo("| -------------------------------- | --------- | ------------ | ----- |")
    for what, name, nbytes in (("to device", "upload", "up"), ("kernel", "kernel", None),
                               ("to host", "download", "down"), ("together, from call to answer", "together", None),
                               ("resident, on arrays that stay", "resident", None)):
        share = f"{100 * found[name] / total:.0f} %" if name in ("upload", "kernel", "download") else ""
        rate = f"{found[nbytes] / found[name] / 1e9:.3g}" if nbytes else ""
        echo(f"| {what:32} | {1e3 * found[name]:9.4f} | {share:>12} | {rate:>5} |")
    click.echo(f"\ncopies       the call takes {found['together'] / found['resident']:.1f} times as long as on arrays "
               "that stay")


@bench.command(cls=GroupedCommand)
@measurement(
    ("--batch", {"metavar": "IMAGES", "type": click.IntRange(1, 1 << 12), "default": 32, "show_default": True,
                 "help": "Images."}),
    ("--size", {"metavar": "PX", "type": click.IntRange(1, 1 << 10), "default": 32, "show_default": True,
                "help": "Side of an image."}),
    ("--channels", {"metavar": "N", "type": click.IntRange(8, 1 << 12), "default": 128, "show_default": True,
                    "help": "Channels, a multiple of 8."}),
    ("--repeats", {"metavar": "N", "type": click.IntRange(1), "default": 20, "show_default": True,
                   "help": "Runs; their median is reported. On the CPU at most 3."}),
    ("--versus", {"type": click.Choice(["torch"]), "help": "Also measure PyTorch's block, eagerly and compiled."}))
@settings("device", "precision")
def block(batch, size, channels, repeats, versus, **given):
    """Measure one ConvNeXt block, forward and with its backward pass, on a GPU and on the CPU.

    With --device cuda the CPU is left out.
    """
    from numdiff.benchmark.block import MODES, bench_block
    from numdiff.benchmark.torch_step import require_torch
    from numdiff.errors import UsageError
    from numdiff.training.options import resolve

    if channels % 8:
        raise UsageError(f"--channels {channels}: a ConvNeXt block takes a multiple of 8.")
    if versus:
        require_torch()
    options = resolve(given)
    echo(f"block        {batch}×{size}×{size}×{channels}, 7×7, inside {4 * channels} channels")
    rows = bench_block(options.device, options.precision, batch, size, channels, MODES if versus else (), repeats,
                       lambda what: click.echo(f"measuring    {what} …", err=True), given.get("device") != "cuda")
    click.echo(f"\n| {'':28s} | forward ms | with backward ms | times numdiff's |")
    echo(f"| {'-' * 28} | {'-' * 10} | {'-' * 16} | {'-' * 15} |")
    for row in rows:
        if "fault" in row:
            echo(f"| {row['where']:28s} | failed: {row['fault']} | | |")
            continue
        against = "{:.2f}, {:.2f}".format(*row["against"]) if "against" in row else ""
        echo(f"| {row['where']:28s} | {1e3 * row['forward']:10.4f} | {1e3 * row['both']:16.4f} | {against:>15} |")


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


@bench.command(cls=GroupedCommand)
@click.argument("file", metavar="[FILE]", type=click.Path(), required=False)
@measurement(
    ("--demand", {"metavar": "IMAGES/S", "type": click.FloatRange(0, min_open=True), "help": "What the step takes, for "
                  "comparison.  [default: that of the fastest step for 64×64 or 256×256 pixels and 32×32×4 latents]"}),
    ("--repeats", {"metavar": "N", "type": click.IntRange(1), "default": 3, "show_default": True,
                   "help": "Epochs to measure for each row, with the file opened again; their median is reported."}),
    ("--images", {"metavar": "N", "type": click.IntRange(1), "help": "Images of an epoch to read at most.  [default: "
                  "all]"}))
@click.option("--batch", cls=Setting, heading="Measurement", metavar="IMAGES", type=click.IntRange(1), default=64,
              show_default=True, help="Images at a time.")
@settings("device", "image_size")
def data(file, batch, demand, repeats, images, device, image_size):
    """Measure how fast images come from the dataset FILE or a folder of pictures (default: the emoji), cold and warm.

    They pass what they pass in training: reading, unpacking, the shuffled order; on a GPU also the upload, and the
    kernel that mirrors and normalises. "From the file" is how a set of two gigabytes and more is read, a smaller one
    lies in memory. Cold: the system has been asked to forget the file.
    """
    from numdiff.benchmark.data import HEADING, bench_data, demand_of, line, verdict
    from numdiff.data.dataset import Dataset, default_path
    from numdiff.data.folders import decoded
    from numdiff.training.options import resolve

    device = resolve({"device": device}).device
    file = decoded(file, image_size) if file and os.path.isdir(file) else file or default_path()
    with Dataset(file, image_size, in_memory=False) as dataset:
        count, height, width, channels = dataset.shape
        demand, path = demand or demand_of(dataset), dataset.path
        echo(f"file         {path}: {count:,} images of {height}×{width}×{channels} {dataset.dtype}, {dataset.stored}")
    where = "the CPU, without upload" if device == "cpu" else device
    echo(f"measured     batches of {batch}, to {where}; median of {repeats}")
    echo("")
    echo(HEADING)
    rows = []
    for row in bench_data(path, image_size, batch, device, repeats, images):
        rows.append(row)
        echo(line(row, demand))
    if text := verdict(rows, demand):
        echo("")
        echo(f"verdict      {text}")


def check_apart(*outputs):
    """Refuse two of the (option, path) that name one file."""
    from numdiff.errors import UsageError
    seen = {}
    for name, path in outputs:
        if path and seen.setdefault(os.path.realpath(path), name) != name:
            raise UsageError(f"{seen[os.path.realpath(path)]} and {name} name one file: give them different names.")


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
