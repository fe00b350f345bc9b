"""What `numdiff ema` does: an average of another width as a model file."""

import pathlib

from ...errors import UsageError, visibly
from ...outputs import check_ending, check_output
from ...training.model_files import is_foreign, read_model_file, write_model_file
from ...training.sampling import find_model


def ema_command(run, std, output=None, outdir="runs", echo=print):
    """Write the weights of a run, averaged with the relative width `std`, as a model file; returns
    its path.

    run: as `sample_command` takes it, but for a model file; output: .h5 (default: ema-STD.h5 next
    to the checkpoint)
    """
    echo = visibly(echo)
    checkpoint = pathlib.Path(find_model(run, outdir, echo))
    if is_foreign(checkpoint):
        raise UsageError(
            f"{checkpoint} keeps no averages of which one of another width can be made: give a run that "
            "was trained with --ema-std."
        )
    path = pathlib.Path(output or checkpoint.with_name(f"ema-{std:g}.h5"))
    check_ending("--output", path, ".h5")
    check_output("the model file", path, checkpoint)
    options, arrays, meta = read_model_file(checkpoint, ema_std=std)
    kept = {name: meta[name] for name in ("classes", "pictures") if meta.get(name)}
    write_model_file(
        path,
        options,
        arrays,
        meta.get("diffusion"),
        meta.get("step", 0),
        meta["model"],
        source=checkpoint.name,
        averaged=meta["averaged"],
        **kept,
    )
    record = meta["averaged"]
    echo(
        f"{path}: weights of {checkpoint} (step {meta.get('step', 0):,}) averaged with the width {std:g}, from "
        f"{record['stored']} stored averages; the profile differs by {100 * record['error']:.2g} %"
    )
    return path
